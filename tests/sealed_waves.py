"""Waves of a step as engines and scorers leave them in the ledger: two completions a prompt, token ids that name it."""

from collections.abc import Callable, Sequence

import numpy as np

from scored_groups import completion, score
from towline.jobs.lost_chunks import give_up
from towline.jobs.work import Workload
from towline.storage.ledger import ScoreSheet, read_shard, seal_scores, seal_shard
from towline.storage.records import ChunkId, RolloutGroup, Score, ShardOrigin

Rewards = Callable[[int], Sequence[float]]


def its_row_twice(row: int) -> Sequence[float]:
    return [float(row)] * 2


def seal(
    work: Workload, chunk: ChunkId, rows: Sequence[int], *, engine: int = 0, began: float = 1.0, ended: float = 2.0,
    took_s: float = 1.0, rewards: Rewards = its_row_twice,
) -> None:  # fmt: skip
    """
    Args:
        rewards: of a row's completions.
    """
    seal_groups(work, chunk, rows, engine=engine, began=began, ended=ended)
    score_all(work, chunk, [total for row in rows for total in rewards(row)], took_s)


def seal_groups(
    work: Workload, chunk: ChunkId, rows: Sequence[int], *, engine: int = 0, began: float = 1.0, ended: float = 2.0
) -> None:
    groups = tuple(
        RolloutGroup(
            prompt=work.data.prompts[row],
            prompt_token_ids=np.array([1, 2], np.int32),
            completions=(completion([row, 3]), completion([row, 4])),
        )
        for row in rows
    )
    origin = ShardOrigin(chunk=chunk, branch=0, engine=engine, attempt=0, weight_hashes={0: ""}, sampling={},
                         began=began, ended=ended)  # fmt: skip
    seal_shard(work.path(chunk), groups, origin)


def seal_wave(work: Workload, step: int, wave: int = 0, *, rewards: Rewards, **times: float) -> None:
    for chunk, rows in work.chunks(step, wave):
        seal(work, chunk, rows, rewards=rewards, **times)


def score_all(work: Workload, chunk: ChunkId, totals: Sequence[float], took_s: float = 0.0) -> None:
    seal_sheet(work, chunk, [score(total) for total in totals], {"exact": 1.0}, took_s)


def seal_sheet(
    work: Workload, chunk: ChunkId, scores: Sequence[Score], weights: dict[str, float], took_s: float = 0.0
) -> None:
    sheet = ScoreSheet(scores=tuple(scores), weights=weights, code_hash="0",
                       shard_digest=read_shard(work.path(chunk)).digest, began=5.0, ended=5.0 + took_s)  # fmt: skip
    seal_scores(work.path(chunk), sheet)


def lose(work: Workload, chunk: ChunkId, run, store) -> None:
    give_up(run, store, work.lease(chunk), attempt=0)
    score_all(work, chunk, [])
