"""What the ledger has of a wave: groups in canonical order, a count of what was lost, and how long it took."""

import numpy as np
import pytest

from scored_groups import NAN, completion
from sealed_waves import lose, score_all, seal
from towline.jobs import recorded_wave
from towline.jobs.recorded_wave import read_wave
from towline.jobs.work import Workload, training_work
from towline.storage.errors import LedgerError, RewardError
from towline.storage.ledger import seal_shard
from towline.storage.records import RolloutGroup, ShardOrigin


@pytest.fixture
def work(run, make_experiment) -> Workload:
    return training_work(make_experiment(), run)


def test_groups_come_in_canonical_order_whichever_engine_was_first(work: Workload):
    (first, first_rows), (second, second_rows) = work.chunks(1)
    seal(work, second, second_rows, engine=0, began=10.0, ended=12.0)
    seal(work, first, first_rows, engine=1, began=20.0, ended=25.0)
    read = read_wave(work, 1)
    assert [scored.group.prompt.row for scored in read.groups] == [*first_rows, *second_rows]
    for scored in read.groups:
        row = scored.group.prompt.row
        assert [one.total for one in scored.scores] == [row, row]
        assert [list(one.token_ids) for one in scored.group.completions] == [[row, 3], [row, 4]]


def test_generation_takes_as_long_as_its_slowest_engine_and_scoring_is_summed(work: Workload):
    (first, first_rows), (second, second_rows) = work.chunks(0)
    # Each engine's own clock: that of engine 1 is an hour ahead.
    seal(work, first, first_rows, engine=0, began=10.0, ended=12.0, took_s=0.5)
    seal(work, second, second_rows, engine=1, began=3610.0, ended=3613.0, took_s=0.25)
    read = read_wave(work, 0)
    assert (read.generation_s, read.scoring_s, read.num_lost) == (3.0, 0.75, 0)


def test_an_engine_that_serves_two_chunks_is_timed_from_the_first_to_the_last(work: Workload):
    (first, first_rows), (second, second_rows) = work.chunks(0)
    seal(work, second, second_rows, engine=0, began=10.0, ended=12.0)
    seal(work, first, first_rows, engine=0, began=11.0, ended=19.0)
    assert read_wave(work, 0).generation_s == 9.0


def test_what_was_given_up_is_counted_and_the_rest_is_trained_on(work: Workload, run, store):
    (first, _), (second, rows) = work.chunks(2)
    lose(work, first, run, store)
    seal(work, second, rows, engine=1, began=1.0, ended=2.0)
    read = read_wave(work, 2)
    assert [scored.group.prompt.row for scored in read.groups] == list(rows)
    assert (read.num_lost, read.num_prompts, read.generation_s) == (2, 4, 1.0)


def test_the_lost_are_counted_in_prompts_and_not_in_chunks(run, make_experiment, store):
    work = training_work(make_experiment(rollout={"chunk_prompts": 3}), run)
    (first, rows), (second, _) = work.chunks(0)
    seal(work, first, rows, engine=0, began=1.0, ended=2.0)
    lose(work, second, run, store)
    read = read_wave(work, 0)
    assert (read.num_lost, read.num_prompts) == (1, 4)


def test_a_step_that_lost_every_chunk_has_nothing_to_train_on(work: Workload, run, store):
    for chunk, _ in work.chunks(1):
        lose(work, chunk, run, store)
    with pytest.raises(RewardError, match="step 1: every chunk killed its engines and was given up"):
        read_wave(work, 1)


def test_a_further_wave_may_be_lost_whole(run, make_experiment, store):
    work = training_work(make_experiment(rollout={"prompts_per_step": 2, "max_waves": 2}), run)
    for chunk, _ in work.chunks(1, 1):
        lose(work, chunk, run, store)
    read = read_wave(work, 1, 1)
    assert (read.groups, read.num_lost, read.num_prompts, read.generation_s) == ([], 2, 2, 0.0)


def test_failed_scores_are_no_lost_chunks(work: Workload):
    (first, rows), (second, second_rows) = work.chunks(0)
    seal(work, second, second_rows, engine=0, began=1.0, ended=2.0)
    groups = tuple(RolloutGroup(prompt=work.data.prompts[row], prompt_token_ids=np.array([1], np.int32),
                                completions=(completion([7]),)) for row in rows)  # fmt: skip
    origin = ShardOrigin(chunk=first, branch=0, engine=0, attempt=0, weight_hashes={0: ""}, sampling={}, began=1.0,
                         ended=2.0)  # fmt: skip
    seal_shard(work.path(first), groups, origin)
    score_all(work, first, [NAN] * len(rows))
    read = read_wave(work, 0)
    assert (len(read.groups), read.num_lost) == (4, 0)


def test_prompts_of_another_seed_are_refused(work: Workload, run, make_experiment):
    other = training_work(make_experiment(seed=1), run)
    assert other.chunks(0) != work.chunks(0)
    for chunk, rows in other.chunks(0):
        seal(other, chunk, rows, engine=0, began=1.0, ended=2.0)
    with pytest.raises(LedgerError, match="it belongs to another dataset or seed"):
        read_wave(work, 0)


def test_a_shard_that_never_shows_is_an_error_in_the_end(work: Workload, clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(recorded_wave, "time", clock)
    began = clock.now
    with pytest.raises(LedgerError, match=r"or its scores are not there 60 s after they were announced"):
        read_wave(work, 0)
    assert 60.0 <= clock.now - began < 61.0
