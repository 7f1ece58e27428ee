"""One wave of a step as the ledger has it: scored groups in canonical order, what was lost, and how long it took."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from towline.jobs.work import Workload
from towline.storage.errors import LedgerError, RewardError
from towline.storage.ledger import read_scored_shard, scores_path
from towline.storage.records import ShardOrigin
from towline.trainer.rollout_batch import ScoredGroup

VISIBLE_WITHIN_S = 60.0
"""A parallel file system may show a sealed file to another node a little later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWave:
    groups: list[ScoredGroup]
    origins: list[tuple[Path, ShardOrigin]]
    """Of every shard that has groups."""
    num_prompts: int
    """That were drawn."""
    num_lost: int
    """Of those, how many were given up."""
    scoring_s: float

    @property
    def generation_s(self) -> float:
        """From the first request to the last, of the slowest engine by its own clock; 0 where all was lost."""
        began: dict[int, float] = {}
        ended: dict[int, float] = {}
        for _, origin in self.origins:
            began[origin.engine] = min(began.get(origin.engine, origin.began), origin.began)
            ended[origin.engine] = max(ended.get(origin.engine, origin.ended), origin.ended)
        return max((ended[engine] - began[engine] for engine in began), default=0.0)


def read_wave(work: Workload, step: int, wave: int = 0) -> RecordedWave:
    """All groups of a wave, whichever engine generated them.

    Raises:
        RewardError: every chunk of wave 0 was given up.
        LedgerError: a shard or its scores are missing, damaged, or of other prompts.
    """
    groups: list[ScoredGroup] = []
    origins: list[tuple[Path, ShardOrigin]] = []
    num_prompts = num_lost = 0
    scoring_s = 0.0
    for chunk, rows in work.chunks(step, wave):
        path = work.path(chunk)
        _wait_until_visible(path)
        shard, sheet = read_scored_shard(path)
        num_prompts += len(rows)
        if not shard.groups:  # given up: sealed without a group
            num_lost += len(rows)
            continue
        _refuse_other_prompts(path, [group.prompt.row for group in shard.groups], rows)
        origins.append((path, shard.origin))
        scoring_s += sheet.ended - sheet.began
        scores = iter(sheet.scores)
        groups += [
            ScoredGroup(group=group, scores=tuple(next(scores) for _ in group.completions)) for group in shard.groups
        ]
    if wave == 0 and not groups:
        raise RewardError(f"step {step}: every chunk killed its engines and was given up; see the engines' logs.")
    return RecordedWave(groups=groups, origins=origins, num_prompts=num_prompts, num_lost=num_lost, scoring_s=scoring_s)


def _refuse_other_prompts(path: Path, found: Sequence[int], expected: Sequence[int]) -> None:
    if list(found) != list(expected):
        raise LedgerError(
            f"{path} holds the prompts {tuple(found)}, expected {tuple(expected)}: it belongs to another dataset or "
            "seed."
        )


def _wait_until_visible(path: Path) -> None:
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not (path.exists() and scores_path(path).exists()):
        if time.monotonic() > deadline:
            raise LedgerError(f"{path} or its scores are not there {VISIBLE_WITHIN_S:g} s after they were announced.")
        time.sleep(0.1)
