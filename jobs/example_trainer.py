"""What a run adds to the training on examples: resume, stop, metrics, checkpoints, held-out examples."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from towline.jobs.agreement import Agreement
from towline.jobs.keep_checkpoint import keep_checkpoint
from towline.jobs.role import Role
from towline.jobs.training_state import training_state
from towline.rollout.evaluation.statistics import Interval, mean_interval, ratio_interval
from towline.storage.errors import NumericsError
from towline.storage.held_out_values import keep_held_out
from towline.storage.metrics import MetricsWriter, append_jsonl
from towline.storage.run_directory import read_jsonl
from towline.trainer.checkpoint import load_checkpoint
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.supervised import Metrics, Objective, train


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutValues:
    """What was measured on each held-out example; the same on every rank."""

    measure: str
    """Its name in the row of the evaluation, such as "nll"."""
    sums: NDArray[np.float64]
    """[examples]"""
    sizes: Sequence[int]
    """How many values each of the sums has: tokens, or 1."""
    margins: NDArray[np.float64] | None = None
    """[examples], of pairs that were scored: chosen - rejected. Two models are compared by them."""
    more: dict[str, float] = field(default_factory=dict[str, float])
    """Further numbers for the row."""


@dataclass(slots=True, kw_only=True)
class ExampleTrainer:
    role: Role
    engine: DeepSpeedEngine
    objective: Objective
    data_hash: str
    """Of everything that says which examples a step holds."""
    resume_step: int | None
    """The checkpoint to go on from; None starts with the model folder's weights."""
    every: int | None
    """Steps between evaluations."""
    evaluate: Callable[[], HeldOutValues] | None
    """Measures the present weights on held-out examples; every rank calls it. None: there are none."""
    alarm: Callable[[int, Metrics], str | None] | None = None
    """What a step's metrics say that a person should read; called on rank 0."""
    _saved: int | None = field(init=False)
    _metrics: MetricsWriter | None = field(init=False, default=None)

    def run(self) -> None:
        role, first = self.role, self.resume_step or 0
        self._saved = self.resume_step
        if self.resume_step is not None:
            role.heartbeat.beat("load")
            present = training_state(role.experiment, self.data_hash, step=first)
            load_checkpoint(
                self.engine, role.run.checkpoints, first, present, on_progress=lambda: role.heartbeat.beat("load")
            )
        if dist.get_rank() == 0:
            self._metrics = MetricsWriter(role.run.metrics, role.run.tensorboard, first_step=first)
        role.heartbeat.beat("ready")
        agreement = Agreement(role, has_lost_every_engine=lambda: False, publish_again=lambda: None)
        # One that an attempt before was ended in is made up for.
        if first == 0 or self._is_due(first):
            self._evaluate(first)
        next_step = train(
            self.objective,
            steps=range(first, role.experiment.steps),
            should_stop=lambda: agreement.wait("train", lambda: "stop" if role.is_stopping else "train") == "stop",
            finish_step=self._finish_step,
        )
        self._close(next_step)

    def _finish_step(self, step: int, metrics: Metrics) -> None:
        experiment = self.role.experiment
        if self._metrics is not None:
            if self.alarm is not None and (text := self.alarm(step, metrics)) is not None:
                append_jsonl(self.role.run.alarms, {"step": step, "text": text})
            self._metrics.write(step, metrics)
        if (step + 1) % experiment.trainer.checkpoint_every == 0:
            self._save(step + 1)
        if self._is_due(step + 1) and step + 1 < experiment.steps:
            self._evaluate(step + 1)

    def _is_due(self, version: int) -> bool:
        return self.every is not None and version % self.every == 0

    def _close(self, next_step: int) -> None:
        """Leave a checkpoint, and judge the last version unless stopped."""
        if next_step != self._saved:
            self._save(next_step)
        is_done = next_step == self.role.experiment.steps
        if is_done:
            self._evaluate(next_step)
        if self._metrics is not None:
            self._metrics.close()
            self.role.store.set("finished", {"status": "done" if is_done else "stopped", "step": next_step})

    def _save(self, step: int) -> None:
        keep_checkpoint(self.role, self.engine, training_state(self.role.experiment, self.data_hash, step=step))
        self._saved = step

    def _evaluate(self, version: int) -> None:
        run = self.role.run
        # An earlier attempt may have judged it.
        is_known = [any(known["version"] == version for known in read_jsonl(run.evaluations))]
        dist.broadcast_object_list(is_known, src=0)
        if self.evaluate is None or is_known[0]:
            return
        self.role.heartbeat.beat("evaluate")
        began = time.monotonic()
        found = self.evaluate()
        if not np.isfinite(found.sums).all():
            raise NumericsError(
                f"version {version}: {found.measure} of {int((~np.isfinite(found.sums)).sum())} of {len(found.sums)} "
                "held-out examples is no finite number: the weights are spoilt. Go on from an earlier checkpoint with "
                "a lower trainer.learning_rate or trainer.max_grad_norm"
            )
        if dist.get_rank() > 0:
            return
        keep_held_out(run, version, found.sums, found.sizes, found.margins)
        interval = _interval(found.sums.tolist(), found.sizes)
        row = {"measure": found.measure, "estimate": interval.estimate, "low": interval.low, "high": interval.high}
        counts = {"num_examples": len(found.sizes), "seconds": time.monotonic() - began}
        append_jsonl(run.evaluations, {"version": version, **row, **found.more, **counts})


def _interval(sums: list[float], sizes: Sequence[int]) -> Interval:
    """Of values of one each, which may be right or wrong, as of a proportion."""
    of_one = mean_interval([[value] for value in sums]) if set(sizes) == {1} else None
    return ratio_interval(sums, sizes) if of_one is None else of_one
