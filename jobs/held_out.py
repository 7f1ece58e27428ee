"""Evaluations on held-out prompts during a run: the engines generate, the scorer judges, rank 0 writes the row."""

import time
from dataclasses import dataclass

import torch.distributed as dist

from towline.jobs.agreement import Agreement
from towline.jobs.recorded_wave import read_wave
from towline.jobs.role import Role
from towline.jobs.work import Workload
from towline.rollout.evaluation.statistics import accuracy_interval
from towline.storage.errors import RewardError
from towline.storage.metrics import append_jsonl
from towline.storage.records import Score, ScoreStatus
from towline.storage.run_directory import read_jsonl


@dataclass(slots=True)
class HeldOut:
    role: Role
    work: Workload
    agreement: Agreement

    def evaluate(self, version: int) -> None:
        """Judge the version that the engines have now. Every rank waits, so that the weights stay as they are."""
        began = time.monotonic()
        is_first = dist.get_rank() == 0
        is_known = is_first and any(row["version"] == version for row in read_jsonl(self.role.run.evaluations))
        if is_first and not is_known:
            self.role.store.set("evaluate", {"version": version})
        # An earlier attempt may have judged it.
        decision = self.agreement.wait("evaluate", lambda: "known" if is_known else self._decide(version))
        if decision == "write" and is_first:
            scores = [score for scored in read_wave(self.work, version).groups for score in scored.scores]
            row = accuracy_row(version, scores)
            append_jsonl(self.role.run.evaluations, {**row, "seconds": time.monotonic() - began})

    def _decide(self, version: int) -> str | None:
        if self.role.is_stopping:
            return "stop"
        scored = (self.role.store.get(f"{self.work.name}/scored/{chunk}") for chunk, _ in self.work.chunks(version))
        return "write" if all(one is not None for one in scored) else None


def accuracy_row(version: int, scores: list[Score]) -> dict[str, float]:
    """Accuracy over the answers that could be judged, with its 95 % interval; the others are counted.

    Raises:
        RewardError: none could be judged. That is no accuracy of 0.
    """
    judged = [score for score in scores if score.status is ScoreStatus.OK]
    if not judged:
        raise RewardError(
            f"evaluation of version {version}: none of {len(scores)} answers could be judged, for example: "
            f"{scores[0].detail if scores else 'there were no prompts'}"
        )
    accuracy = accuracy_interval(sum(score.total == 1.0 for score in judged), len(judged))
    return {
        "version": version,
        "accuracy": accuracy.estimate,
        "low": accuracy.low,
        "high": accuracy.high,
        "num_prompts": len(judged),
        "num_failed": len(scores) - len(judged),
    }
