"""The part `length`: when it joins, what it then does to the totals, and that the ledger alone decides."""

from dataclasses import replace

import pytest

from scored_groups import score
from sealed_waves import seal_groups, seal_sheet
from towline.jobs.failed_scores import FailedScores
from towline.jobs.length_reward import length_reward
from towline.jobs.recorded_wave import read_wave
from towline.jobs.trainer_rollouts import RecordedRollouts
from towline.jobs.work import Workload, training_work
from towline.storage.errors import LedgerError

NAN = float("nan")
LENGTH = {"use": "length", "weight": 0.5, "target_tokens": 1, "when": {"exact_match": 1.0},
          "converged": {"min_reward": 0.75, "window": 2, "tolerance": 0.125}}  # fmt: skip


@pytest.fixture(params=[1])
def work(request, run, make_experiment) -> Workload:
    """Two prompts a wave, each with two completions; the parameter is how many waves a step may have."""
    rewards = [{"use": "exact_match", "weight": 1.0}, LENGTH]
    rollout = {"prompts_per_step": 2, "chunk_prompts": 1, "max_waves": request.param}
    return training_work(make_experiment(steps=9, rewards=rewards, rollout=rollout), run)


def recorded(work: Workload) -> RecordedRollouts:
    return RecordedRollouts(work, FailedScores(0.1))


several_waves = pytest.mark.parametrize("work", [2], indirect=True)


def seal(
    work: Workload, step: int, *rewards: float, wave: int = 0, lengths: tuple[float, float] = (-0.25, -1.0)
) -> None:
    """
    Args:
        rewards: of the first and the second completion of each prompt.
        lengths: values of the part `length`, likewise.
    """
    for chunk, rows in work.chunks(step, wave):
        seal_groups(work, chunk, rows)
        scores = [
            score(reward, exact_match=reward, length=length) for reward, length in zip(rewards, lengths, strict=True)
        ] * len(rows)
        seal_sheet(work, chunk, scores, {"exact_match": 1.0, "length": 0.5})


def totals(work: Workload, step: int) -> list[float]:
    """Of the groups that the step is trained on, by a trainer that has just started."""
    batch = recorded(work).read(step)
    return [one.total for scored in batch.trained for one in scored.scores]


def test_length_joins_after_two_windows_that_are_alike_and_stays(work: Workload):
    means = [0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    for step, mean in enumerate(means):
        seal(work, step, mean, mean)
    length = length_reward(work)
    assert length is not None
    # Steps 2 and 3 have 1.0, 0 and 1 have 0.25; steps 3 and 4 have 1.0, 1 and 2 have 0.75; 4 and 5 are as 2 and 3.
    assert [length.since(step) for step in range(9)] == [None] * 6 + [6, 6, 6]
    assert [length.since(step) for step in (5, 8)] == [None, 6]


def test_from_then_on_right_answers_pay_for_their_length(work: Workload):
    for step in range(4):
        seal(work, step, 1.0, 1.0)
        assert totals(work, step) == [1.0, 1.0] * 2
    seal(work, 4, 1.0, 1.0)
    assert totals(work, 4) == [1.0 - 0.125, 1.0 - 0.5] * 2
    seal(work, 5, 0.0, 1.0)
    assert totals(work, 5) == [0.0, 1.0 - 0.5] * 2
    seal(work, 6, NAN, 1.0)
    assert repr(totals(work, 6)) == "[nan, 0.5, nan, 0.5]"


def test_the_ledger_and_held_out_readers_know_nothing_of_it(work: Workload):
    for step in range(5):
        seal(work, step, 1.0, 1.0)
    assert {one.total for scored in read_wave(work, 4).groups for one in scored.scores} == {1.0}


@several_waves
def test_a_right_group_becomes_useful_by_its_lengths_and_draws_no_further_wave(work: Workload):
    for step in range(5):
        seal(work, step, 1.0, 1.0)
    seal(work, 3, 1.0, 1.0, wave=1)
    assert recorded(work).read(3).metrics == {
        "rollouts/waves": 2,
        "rollouts/useful": 0,
        "rollouts/surplus": 0,
    }
    assert recorded(work).read(4).metrics == {
        "rollouts/waves": 1,
        "rollouts/useful": 2,
        "rollouts/surplus": 0,
    }


@several_waves
def test_only_the_first_wave_and_what_could_be_scored_count_for_it(work: Workload):
    for step in range(4):
        seal(work, step, NAN, 1.0)
        seal(work, step, 0.0, 0.0, wave=1)
    seal(work, 4, 1.0, 1.0)
    assert totals(work, 4) == [1.0 - 0.125, 1.0 - 0.5] * 2


def test_a_trainer_that_starts_late_comes_to_the_same_as_one_that_was_there(work: Workload):
    early = recorded(work)
    for step, mean in enumerate([0.5, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]):
        seal(work, step, mean, 1.0)
        there = early.read(step)
        late = recorded(work).read(step)
        assert [scored.scores for scored in there.trained] == [scored.scores for scored in late.trained]
        assert there.metrics == late.metrics


def test_a_missing_step_is_an_error_and_not_another_moment(work: Workload):
    for step in range(1, 5):
        seal(work, step, 1.0, 1.0)
    with pytest.raises(LedgerError, match=r"step-000000.*is missing"):
        recorded(work).read(4)


def test_a_run_without_it_reads_no_earlier_step(work: Workload):
    without = replace(work, rewards=work.rewards[:1])
    assert length_reward(without) is None
    seal(work, 4, 1.0, 1.0)
    assert totals(without, 4) == [1.0, 1.0] * 2
