"""Which groups a step trains on: a pure function of what was drawn, by place and never by time."""

import itertools

import pytest

from scored_groups import NAN, completion, scored_group
from towline.storage.metrics import check_names
from towline.storage.records import FinishReason
from towline.trainer.dynamic_sampling import step_batch, wants_another_wave
from towline.trainer.rollout_batch import is_useful, training_sequences


def group(*rewards, row=0):
    return scored_group([7], [completion([1])] * len(rewards), list(rewards), row=row)


def wave(pattern, first_row):
    """One group a letter: "u" useful, "e" of equal rewards, "f" of failed scores."""
    rewards = {"u": (0.0, 1.0), "e": (1.0, 1.0), "f": (NAN, NAN)}
    return [group(*rewards[letter], row=first_row + place) for place, letter in enumerate(pattern)]


def waves(*patterns):
    starts = itertools.accumulate((len(pattern) for pattern in patterns), initial=0)
    return [wave(pattern, start) for pattern, start in zip(patterns, starts, strict=False)]


def rows(groups):
    return [scored.group.prompt.row for scored in groups]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ((0.0, 1.0), True),
        ((1.0, 1.0, 1.0), False),
        ((0.1, 0.1, 0.1), False),
        ((-0.5, 0.5, 0.5), True),
        ((1.0, NAN), False),
        ((1.0, NAN, 0.0), True),
        ((1.0, NAN, 1.0), False),
        ((NAN, NAN), False),
    ],
)
def test_a_group_is_useful_when_two_scored_rewards_differ(rewards, expected):
    assert is_useful(group(*rewards)) is expected


def test_the_reward_of_an_aborted_completion_makes_no_difference():
    aborted = completion([2], finish_reason=FinishReason.ABORTED)
    assert not is_useful(scored_group([7], [completion([1]), completion([1]), aborted], [1.0, 1.0, 0.0]))
    assert is_useful(scored_group([7], [completion([1]), completion([1]), aborted], [1.0, 0.0, 0.0]))


def test_useful_groups_are_those_with_advantages():
    for rewards in itertools.product([0.0, 0.1, 0.7, NAN], repeat=3):
        sequences = training_sequences([group(*rewards)], baseline="group", scale="std")
        assert is_useful(group(*rewards)) == any(one.advantage for one in sequences), rewards


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ((), True),
        (("uuu",), False),
        (("ueu",), True),
        (("ueu", "eee"), True),
        (("ueu", "efu"), False),
        (("ueu", "uuu"), False),
        (("eee", "eee", "eee"), False),  # as many as it may draw
    ],
)
def test_waves_are_drawn_until_the_batch_is_full_and_no_longer_than_allowed(patterns, expected):
    assert wants_another_wave(waves(*patterns), num_wanted=3, max_waves=3) is expected


def test_with_one_wave_nothing_is_asked_for_and_nothing_left_out():
    (only,) = waves("efeu")
    assert not wants_another_wave([only], num_wanted=4, max_waves=1)
    batch = step_batch([only], num_wanted=4, max_waves=1)
    assert (batch.drawn, batch.trained, batch.metrics) == (only, only, {})


def test_the_first_useful_groups_are_kept_by_wave_and_place_and_the_rest_counted():
    batch = step_batch(waves("eueu", "ueuu"), num_wanted=4, max_waves=3)
    assert rows(batch.trained) == [1, 3, 4, 6]
    assert rows(batch.drawn) == [0, 1, 2, 3]
    assert batch.metrics == {"rollouts/waves": 2, "rollouts/useful": 5, "rollouts/surplus": 1}
    check_names(batch.metrics)


def test_with_fewer_useful_groups_than_wanted_it_trains_on_those():
    batch = step_batch(waves("eeu", "eee"), num_wanted=3, max_waves=2)
    assert rows(batch.trained) == [2]
    assert batch.metrics == {"rollouts/waves": 2, "rollouts/useful": 1, "rollouts/surplus": 0}


def test_without_a_useful_group_the_first_wave_is_trained_on_as_it_is():
    drawn = waves("eef", "eee")
    batch = step_batch(drawn, num_wanted=3, max_waves=2)
    assert batch.trained == batch.drawn == drawn[0]
    assert batch.metrics["rollouts/useful"] == 0


def test_a_wave_that_was_lost_is_drawn_and_adds_nothing():
    drawn = [*waves("ueu"), []]
    assert wants_another_wave(drawn, num_wanted=3, max_waves=3)
    assert rows(step_batch(drawn, num_wanted=3, max_waves=2).trained) == [0, 2]


def test_dapo_where_every_group_is_useful_has_the_batch_of_grpo():
    drawn = waves("uuuu")
    assert not wants_another_wave(drawn, num_wanted=4, max_waves=5)
    dapo, grpo = (step_batch(drawn, num_wanted=4, max_waves=most) for most in (5, 1))
    assert (dapo.drawn, dapo.trained) == (grpo.drawn, grpo.trained)
