"""DPO with several values of beta: a run for each, and which of them wins on held-out pairs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from towline.jobs.experiment import DpoExperiment
from towline.jobs.step_lines import number
from towline.rollout.evaluation.statistics import ratio_interval
from towline.storage.held_out_values import read_held_out
from towline.storage.run_directory import RunDirectory, read_jsonl


def sweep_runs(experiment: DpoExperiment, betas: Sequence[float], base: str) -> list[DpoExperiment]:
    """All read one table of the reference, which the first one writes.

    Args:
        base: what their names begin with.
    """
    tables = experiment.policy.reference_tables or experiment.run.root / f"{base}-reference"
    return [_with_beta(experiment, beta, base, tables) for beta in betas]


def _with_beta(experiment: DpoExperiment, beta: float, base: str, tables: Path) -> DpoExperiment:
    return experiment.model_copy(
        update={
            "sweep": None,
            "trainer": experiment.trainer.model_copy(update={"beta": beta}),
            "policy": experiment.policy.model_copy(update={"reference_tables": tables}),
            "run": experiment.run.model_copy(update={"name": f"{base}-beta-{beta:g}"}),
        }
    )


def sweep_lines(experiments: Sequence[DpoExperiment]) -> Iterator[str]:
    """A row for each beta: its held-out win rate, and how it differs from the best on the same pairs.

    Args:
        experiments: whose runs are done.
    """
    runs = {one.trainer.beta: RunDirectory.open(one.run.root / str(one.run.name)) for one in experiments}
    last = {beta: read_jsonl(run.evaluations)[-1] for beta, run in runs.items()}
    # Of equals the largest: it stays nearest to the reference.
    best = max(last, key=lambda beta: (last[beta]["estimate"], beta))
    wins = read_held_out(runs[best], last[best]["version"])[:, 0]
    yield f"{'beta':>8}  {'win rate':25}  {'margin':>8}  less than the best, on the same pairs"
    for beta, row in last.items():
        rate = f"{row['estimate']:.3f} ({row['low']:.3f} to {row['high']:.3f})"
        found = read_held_out(runs[beta], row["version"])[:, 0]
        behind = ratio_interval((found - wins).tolist(), [1] * len(wins))
        difference = "best" if beta == best else f"{behind.estimate:+.3f} ({behind.low:+.3f} to {behind.high:+.3f})"
        told = "" if beta == best or behind.high < 0 else "   not told apart"
        yield f"{beta:>8g}  {rate:25}  {number(row.get('margin'), '.3f'):>8}  {difference}{told}"
