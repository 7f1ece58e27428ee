"""A step's scored rollouts, for the trainer: live from the engines, or again from the ledger."""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from towline.jobs.role import Role
from towline.jobs.work import Workload
from towline.storage.errors import LedgerError
from towline.storage.ledger import read_scored_shard, scores_path
from towline.trainer.rollout_batch import ScoredGroup

VISIBLE_WITHIN_S = 60.0
"""A parallel file system may show a sealed file to another node a little later."""


@dataclass(slots=True)
class LiveRollouts:
    """Rank 0 waits until every chunk of the step is scored and tells the others; then each rank reads the shards."""

    role: Role
    work: Workload

    def read(self, step: int) -> list[ScoredGroup] | None:
        plan = f"plan/{step}"
        if dist.get_rank() == 0:
            self.role.store.set("training", step)
            self.role.store.set(plan, "train" if self._wait(step) else "stop")
        decision = self.role.store.wait(plan, math.inf, lambda: self.role.heartbeat.beat("wait for rollouts"))
        return read_step(self.work, step) if decision == "train" else None

    def _wait(self, step: int) -> bool:
        """True when the step is complete, False when the run is to stop first."""
        for chunk, _ in self.work.chunks(step):
            while self.role.store.get(f"{self.work.name}/scored/{chunk}") is None:
                if self.role.is_stopping:
                    return False
                self.role.heartbeat.beat("wait for rollouts")
                time.sleep(0.02)
        return not self.role.is_stopping


@dataclass(slots=True)
class RecordedRollouts:
    """The same steps again, from the ledger alone."""

    work: Workload

    def read(self, step: int) -> list[ScoredGroup]:
        return read_step(self.work, step)


def read_step(work: Workload, step: int) -> list[ScoredGroup]:
    """All groups of a step in canonical order, whichever engine generated them."""
    groups: list[ScoredGroup] = []
    for chunk, rows in work.chunks(step):
        path = work.path(chunk)
        _wait_until_visible(path)
        shard, sheet = read_scored_shard(path)
        found = tuple(group.prompt.row for group in shard.groups)
        if found != rows:
            raise LedgerError(
                f"{path} holds the prompts {found}, expected {rows}: it belongs to another dataset or seed."
            )
        scores = iter(sheet.scores)
        groups += [
            ScoredGroup(group=group, scores=tuple(next(scores) for _ in group.completions)) for group in shard.groups
        ]
    return groups


def _wait_until_visible(path: Path) -> None:
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not (path.exists() and scores_path(path).exists()):
        if time.monotonic() > deadline:
            raise LedgerError(f"{path} or its scores are not there {VISIBLE_WITHIN_S:g} s after they were announced.")
        time.sleep(0.1)
