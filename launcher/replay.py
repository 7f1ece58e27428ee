"""`towline replay`: train again from the recorded rollouts, without engines, and compare the losses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from towline.jobs.step_lines import Row
from towline.jobs.supervisor import supervise
from towline.jobs.work import Workload, training_work
from towline.launcher.progress import RunProgress
from towline.launcher.rollout_run import rollout_experiment
from towline.storage.errors import InputError, LedgerError
from towline.storage.ledger import scores_path
from towline.storage.run_directory import RunDirectory, read_jsonl

LOSSES = ("loss/policy", "loss/preference")
"""Of GRPO, and of DPO on pairs of rollouts."""
TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLosses:
    step: int
    live: float
    replayed: float

    @property
    def difference(self) -> float:
        return self.replayed - self.live

    @property
    def is_same(self) -> bool:
        # False for NaN as well.
        return abs(self.difference) <= TOLERANCE


def replay_run(run: RunDirectory, step: int) -> int:
    """Return 0 when the loss of every replayed step is the live one.

    A step whose rollouts were scored can be replayed although the run did not get through it: what ended it there ends
    the replay too.

    Raises:
        InputError: the run has neither trained that step nor all of its scored rollouts.
        RunFault: the replay itself failed.
    """
    live = {row["step"]: row for row in read_jsonl(run.metrics)}
    experiment = rollout_experiment(run, "replay")
    if step not in live and not _is_recorded(training_work(experiment, run), step):
        trained = f"steps 0 to {max(live)}" if live else "no step"
        raise InputError(f"{run.root.name} has trained {trained}; step {step} cannot be replayed.")
    attempt = run.attempts
    with RunProgress(Console(), experiment.steps) as progress:
        supervise(run, experiment, _OnlyPhases(progress), replay_step=step)
    losses = compare_losses(live, read_jsonl(run.logs(attempt) / "replay.jsonl"))
    print("\n".join(table(losses)))
    return 0 if all(one.is_same for one in losses) else 1


def _is_recorded(work: Workload, step: int) -> bool:
    shards = [work.path(chunk) for chunk, _ in work.chunks(step)]
    return all(shard.exists() and scores_path(shard).exists() for shard in shards)


class _OnlyPhases:
    """The supervisor shows the run's own metrics, which are of the past here."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress

    def on_attempt(self, number: int) -> None: ...

    def on_phases(self, phases: dict[str, str]) -> None:
        self._progress.on_phases(phases)

    def on_step(self, row: dict[str, object]) -> None:
        pass

    def on_evaluation(self, row: dict[str, object]) -> None:
        pass

    def on_event(self, text: str) -> None:
        self._progress.on_event(text)


def compare_losses(live: Mapping[int, Row], replayed: Sequence[Row]) -> list[StepLosses]:
    if not replayed:
        raise LedgerError("the replay ended without training a step; see its log.")
    return [
        StepLosses(step=int(row["step"]), live=_loss(live.get(int(row["step"]), {})), replayed=_loss(row))
        for row in replayed
    ]


def _loss(row: Row) -> float:
    """What was not finite is written as null; a step that was not finished has no loss."""
    # A round whose rewards made no pair minimised nothing, live and again.
    if row.get("preference/pairs") == 0:
        return 0.0
    value = next((row[name] for name in LOSSES if name in row), None)
    return float("nan") if value is None else value


def table(losses: Sequence[StepLosses]) -> list[str]:
    lines = [
        f"{one.step:>6}  {one.live:>+14.8f}  {one.replayed:>+14.8f}  {one.difference:>+9.1e}"
        f"{'' if one.is_same else '  differs'}"
        for one in losses
    ]
    worst = max(abs(one.difference) for one in losses)
    num_same = sum(one.is_same for one in losses)
    verdict = f"{num_same} of {len(losses)} steps within {TOLERANCE:g}; largest difference {worst:.1e}"
    return [f"{'step':>6}  {'live loss':>14}  {'replayed':>14}  {'change':>9}", *lines, verdict]
