"""A step's scored rollouts, for the trainer: live from the engines, or again from the ledger."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from towline.jobs.agreement import Agreement
from towline.jobs.role import Role
from towline.jobs.work import Workload
from towline.storage.errors import LedgerError, RewardError
from towline.storage.ledger import ScoreSheet, Shard, read_scored_shard, scores_path
from towline.storage.lineage import Lineage, fits, is_off_policy
from towline.storage.records import ShardOrigin
from towline.storage.set_aside import set_aside
from towline.trainer.grpo import Metrics
from towline.trainer.rollout_batch import ScoredGroup

VISIBLE_WITHIN_S = 60.0
"""A parallel file system may show a sealed file to another node a little later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    groups: list[ScoredGroup]
    metrics: Metrics
    """How long generation and scoring took, and what was lost."""
    origins: list[tuple[Path, ShardOrigin]]


@dataclass(slots=True)
class LiveRollouts:
    """Rank 0 waits until every chunk of the step is scored and tells the others; then each rank reads the shards."""

    role: Role
    work: Workload
    agreement: Agreement
    lineage: Lineage
    metrics: Metrics = field(default_factory=Metrics)
    """Of the step read last."""

    def read(self, step: int) -> list[ScoredGroup] | None:
        if dist.get_rank() == 0:
            self.role.store.set("training", step)
        chunks = self.work.chunks(step)
        scored = iter(chunks)
        waits_for = next(scored)[0]

        def decide() -> str | None:
            """Chunk after chunk: "train" when the step is complete, "stop" when the run is to stop first."""
            nonlocal waits_for
            if self.role.is_stopping:
                return "stop"
            while self.role.store.get(f"{self.work.name}/scored/{waits_for}") is not None:
                following = next(scored, None)
                if following is None:
                    return "train"
                waits_for = following[0]
            return None

        if self.agreement.wait("wait for rollouts", decide) == "stop":
            return None
        rollouts = read_step(self.work, step)
        self.metrics = rollouts.metrics
        if dist.get_rank() == 0:
            self.metrics |= {"rollouts/off_policy": self._judge(rollouts.origins)}
        return rollouts.groups

    def _judge(self, origins: list[tuple[Path, ShardOrigin]]) -> float:
        """The fraction of shards that another branch's policy wrote.

        Raises:
            LedgerError: a shard was written by weights that this run does not have; it is set aside.
        """
        for path, origin in origins:
            reason = fits(
                self.lineage,
                origin,
                sampling_hash=self.work.sampling_hash,
                max_staleness=self.role.experiment.rollout.max_staleness,
            )
            if reason is not None:
                set_aside(self.role.run, path, reason, self.role.attempt)
                raise LedgerError(
                    f"{path} does not fit this run and is set aside: {reason}. A resume generates it again."
                )
        return sum(is_off_policy(self.lineage, origin) for _, origin in origins) / len(origins)


@dataclass(slots=True)
class RecordedRollouts:
    """The same steps again, from the ledger alone."""

    work: Workload

    def read(self, step: int) -> list[ScoredGroup]:
        return read_step(self.work, step).groups


def read_step(work: Workload, step: int) -> StepRollouts:
    """All groups of a step in canonical order, whichever engine generated them.

    Raises:
        RewardError: every chunk of the step was given up.
    """
    groups: list[ScoredGroup] = []
    shards: list[tuple[Shard, ScoreSheet]] = []
    origins: list[tuple[Path, ShardOrigin]] = []
    num_lost = num_prompts = 0
    for chunk, rows in work.chunks(step):
        path = work.path(chunk)
        _wait_until_visible(path)
        shard, sheet = read_scored_shard(path)
        found = tuple(group.prompt.row for group in shard.groups)
        num_prompts += len(rows)
        if not found:  # given up: sealed without a group
            num_lost += len(rows)
            continue
        if found != rows:
            raise LedgerError(
                f"{path} holds the prompts {found}, expected {rows}: it belongs to another dataset or seed."
            )
        shards.append((shard, sheet))
        origins.append((path, shard.origin))
        scores = iter(sheet.scores)
        groups += [
            ScoredGroup(group=group, scores=tuple(next(scores) for _ in group.completions)) for group in shard.groups
        ]
    if not groups:
        raise RewardError(f"step {step}: every chunk killed its engines and was given up; see the engines' logs.")
    metrics = {**_seconds(shards), "rollouts/lost": num_lost / num_prompts}
    return StepRollouts(groups=groups, metrics=metrics, origins=origins)


def _seconds(shards: list[tuple[Shard, ScoreSheet]]) -> Metrics:
    """Generation and scoring time of a step: from the first request to the last, by each engine's own clock."""
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    for shard, _ in shards:
        engine = shard.origin.engine
        began[engine] = min(began.get(engine, shard.origin.began), shard.origin.began)
        ended[engine] = max(ended.get(engine, shard.origin.ended), shard.origin.ended)
    return {
        "seconds/generate": max(ended[engine] - began[engine] for engine in began),
        "seconds/score": sum(sheet.ended - sheet.began for _, sheet in shards),
    }


def _wait_until_visible(path: Path) -> None:
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not (path.exists() and scores_path(path).exists()):
        if time.monotonic() > deadline:
            raise LedgerError(f"{path} or its scores are not there {VISIBLE_WITHIN_S:g} s after they were announced.")
        time.sleep(0.1)
