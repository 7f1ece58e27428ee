"""What the trainer reads of a step: groups in canonical order, and a count of what was lost."""

import numpy as np
import pytest

from scored_groups import NAN, completion, score
from towline.jobs import trainer_rollouts
from towline.jobs.lost_chunks import give_up
from towline.jobs.trainer_rollouts import RecordedRollouts, read_step
from towline.jobs.work import Workload, training_work
from towline.storage.errors import LedgerError, RewardError
from towline.storage.ledger import ScoreSheet, read_shard, seal_scores, seal_shard
from towline.storage.metrics import check_names
from towline.storage.records import ChunkId, RolloutGroup, ShardOrigin


@pytest.fixture
def work(run, make_experiment) -> Workload:
    return training_work(make_experiment(), run)


def seal(work: Workload, chunk: ChunkId, rows, *, engine: int, began: float, ended: float, took_s: float = 1.0) -> None:
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
    score_all(work, chunk, [float(row) for row in rows for _ in range(2)], took_s)


def score_all(work: Workload, chunk: ChunkId, totals: list[float], took_s: float = 0.0) -> None:
    sheet = ScoreSheet(scores=tuple(score(total) for total in totals), weights={"exact": 1.0}, code_hash="0",
                       shard_digest=read_shard(work.path(chunk)).digest, began=5.0, ended=5.0 + took_s)  # fmt: skip
    seal_scores(work.path(chunk), sheet)


def lose(work: Workload, chunk: ChunkId, run, store) -> None:
    give_up(run, store, work.lease(chunk), attempt=0)
    score_all(work, chunk, [])


def test_groups_come_in_canonical_order_whichever_engine_was_first(work: Workload):
    (first, first_rows), (second, second_rows) = work.chunks(1)
    seal(work, second, second_rows, engine=0, began=10.0, ended=12.0)
    seal(work, first, first_rows, engine=1, began=20.0, ended=25.0)
    read = read_step(work, 1)
    assert [scored.group.prompt.row for scored in read.groups] == [*first_rows, *second_rows]
    for scored in read.groups:
        row = scored.group.prompt.row
        assert [one.total for one in scored.scores] == [row, row]
        assert [list(one.token_ids) for one in scored.group.completions] == [[row, 3], [row, 4]]
    replayed = RecordedRollouts(work).read(1)
    assert [scored.group.prompt for scored in replayed] == [scored.group.prompt for scored in read.groups]


def test_generation_takes_as_long_as_its_slowest_engine_and_scoring_is_summed(work: Workload):
    (first, first_rows), (second, second_rows) = work.chunks(0)
    # Each engine's own clock: that of engine 1 is an hour ahead.
    seal(work, first, first_rows, engine=0, began=10.0, ended=12.0, took_s=0.5)
    seal(work, second, second_rows, engine=1, began=3610.0, ended=3613.0, took_s=0.25)
    metrics = read_step(work, 0).metrics
    assert metrics == {"seconds/generate": 3.0, "seconds/score": 0.75, "rollouts/lost": 0.0}
    check_names(metrics)


def test_an_engine_that_serves_two_chunks_is_timed_from_the_first_to_the_last(work: Workload):
    (first, first_rows), (second, second_rows) = work.chunks(0)
    seal(work, second, second_rows, engine=0, began=10.0, ended=12.0)
    seal(work, first, first_rows, engine=0, began=11.0, ended=19.0)
    assert read_step(work, 0).metrics["seconds/generate"] == 9.0


def test_what_was_given_up_is_counted_and_the_rest_is_trained_on(work: Workload, run, store):
    (first, _), (second, rows) = work.chunks(2)
    lose(work, first, run, store)
    seal(work, second, rows, engine=1, began=1.0, ended=2.0)
    read = read_step(work, 2)
    assert [scored.group.prompt.row for scored in read.groups] == list(rows)
    assert read.metrics["rollouts/lost"] == 0.5
    assert read.metrics["seconds/generate"] == 1.0


def test_the_lost_are_counted_in_prompts_and_not_in_chunks(run, make_experiment, store):
    work = training_work(make_experiment(rollout={"chunk_prompts": 3}), run)
    (first, rows), (second, _) = work.chunks(0)
    seal(work, first, rows, engine=0, began=1.0, ended=2.0)
    lose(work, second, run, store)
    assert read_step(work, 0).metrics["rollouts/lost"] == 0.25


def test_a_step_that_lost_every_chunk_has_nothing_to_train_on(work: Workload, run, store):
    for chunk, _ in work.chunks(1):
        lose(work, chunk, run, store)
    with pytest.raises(RewardError, match="step 1: every chunk killed its engines and was given up"):
        read_step(work, 1)


def test_failed_scores_are_no_lost_chunks(work: Workload):
    (first, rows), (second, second_rows) = work.chunks(0)
    seal(work, second, second_rows, engine=0, began=1.0, ended=2.0)
    groups = tuple(RolloutGroup(prompt=work.data.prompts[row], prompt_token_ids=np.array([1], np.int32),
                                completions=(completion([7]),)) for row in rows)  # fmt: skip
    origin = ShardOrigin(chunk=first, branch=0, engine=0, attempt=0, weight_hashes={0: ""}, sampling={}, began=1.0,
                         ended=2.0)  # fmt: skip
    seal_shard(work.path(first), groups, origin)
    score_all(work, first, [NAN] * len(rows))
    read = read_step(work, 0)
    assert (len(read.groups), read.metrics["rollouts/lost"]) == (4, 0.0)


def test_prompts_of_another_seed_are_refused(work: Workload, run, make_experiment):
    other = training_work(make_experiment(seed=1), run)
    assert other.chunks(0) != work.chunks(0)
    for chunk, rows in other.chunks(0):
        seal(other, chunk, rows, engine=0, began=1.0, ended=2.0)
    with pytest.raises(LedgerError, match="it belongs to another dataset or seed"):
        read_step(work, 0)


def test_a_shard_that_never_shows_is_an_error_in_the_end(work: Workload, clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trainer_rollouts, "time", clock)
    began = clock.now
    with pytest.raises(LedgerError, match=r"or its scores are not there 60 s after they were announced"):
        read_step(work, 0)
    assert 60.0 <= clock.now - began < 61.0
