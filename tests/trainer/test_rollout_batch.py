import numpy as np
import pytest

from scored_groups import NAN, completion, score, scored_group
from towline.storage.records import FinishReason
from towline.trainer.rollout_batch import reward_metrics, training_sequences


def advantages(sequences):
    return [sequence.advantage for sequence in sequences]


def tokens(sequences):
    return [sequence.tokens.token_ids.tolist() for sequence in sequences]


def test_sequences_by_hand():
    group = scored_group(
        [7, 8],
        [completion([1, 2], [-0.5, -0.25], version=3), completion([4], [-2.0], version=4)],
        [1.0, 0.0],
    )
    first, second = training_sequences([group], baseline="group", scale="none")
    assert tokens([first, second]) == [[7, 8, 1, 2], [7, 8, 4]]
    assert [first.tokens.num_prompt_tokens, second.tokens.num_prompt_tokens] == [2, 2]
    assert first.rollout_logprobs.tolist() == [-0.5, -0.25]
    assert first.versions.tolist() == [3, 3]
    assert second.versions.tolist() == [4]
    assert advantages([first, second]) == [0.5, -0.5]


def test_advantages_are_divided_by_the_population_std():
    group = scored_group([7], [completion([1])] * 4, [0.0, 0.0, 0.0, 1.0])
    # mean 1/4, std sqrt(3)/4
    assert advantages(training_sequences([group], baseline="group", scale="std")) == pytest.approx(
        [-(3**-0.5)] * 3 + [3**0.5], rel=1e-5
    )


def test_groups_never_meet():
    groups = [
        scored_group([7], [completion([1])] * 2, [0.0, 1.0]),
        scored_group([7], [completion([1])] * 2, [10.0, 30.0], row=1),
    ]
    sequences = training_sequences(groups, baseline="group", scale="none")
    assert advantages(sequences) == [-0.5, 0.5, -10.0, 10.0]
    assert [sequence.group for sequence in sequences] == [0, 0, 1, 1]


def test_a_failed_score_is_in_neither_the_mean_nor_the_tokens():
    # G3-04
    group = scored_group([7], [completion([1]), completion([2, 2]), completion([3])], [1.0, NAN, 3.0])
    sequences = training_sequences([group], baseline="group", scale="none")
    assert tokens(sequences) == [[7, 1], [7, 3]]
    assert advantages(sequences) == [-1.0, 1.0]


def test_an_aborted_completion_is_in_neither_the_mean_nor_the_tokens():
    aborted = completion([2, 2], finish_reason=FinishReason.ABORTED)
    group = scored_group([7], [completion([1]), aborted, completion([3])], [1.0, 100.0, 3.0])
    sequences = training_sequences([group], baseline="group", scale="none")
    assert tokens(sequences) == [[7, 1], [7, 3]]
    assert advantages(sequences) == [-1.0, 1.0]


def test_a_truncated_completion_is_trained_on():
    truncated = completion([2], finish_reason=FinishReason.LENGTH)
    group = scored_group([7], [completion([1]), truncated], [1.0, 0.0])
    assert tokens(training_sequences([group], baseline="group", scale="none")) == [[7, 1], [7, 2]]


@pytest.mark.parametrize("rewards", [[1.0, NAN, NAN], [NAN, NAN, NAN]])
def test_a_group_with_fewer_than_two_scores_is_dropped_and_the_others_keep_their_number(rewards):
    lonely = scored_group([7], [completion([1])] * 3, rewards)
    other = scored_group([8], [completion([2])] * 2, [0.0, 1.0], row=1)
    sequences = training_sequences([lonely, other], baseline="group", scale="std")
    assert tokens(sequences) == [[8, 2], [8, 2]]
    assert [sequence.group for sequence in sequences] == [1, 1]


def test_a_group_with_one_score_that_is_not_of_an_aborted_completion_is_dropped():
    aborted = completion([2], finish_reason=FinishReason.ABORTED)
    group = scored_group([7], [completion([1]), aborted, aborted], [1.0, 0.0, 0.5])
    assert training_sequences([group], baseline="group", scale="std") == []


def test_equal_rewards_have_advantage_exactly_0_and_stay():
    # 0.1 three times: their mean differs from 0.1 in the last bit
    group = scored_group([7], [completion([1])] * 3, [0.1, 0.1, 0.1])
    sequences = training_sequences([group], baseline="group", scale="std")
    assert advantages(sequences) == [0.0, 0.0, 0.0]


def test_metrics_by_hand():
    groups = [
        scored_group(
            [7],
            [completion([1, 1]), completion([2], finish_reason=FinishReason.LENGTH), completion([3, 3, 3])],
            [score(1.0, exact=1.0, format=0.0), score(0.5, exact=0.0, format=1.0), score(NAN, exact=NAN, format=1.0)],
        ),
        scored_group(
            [8],
            [completion([4] * 4), completion([5] * 4), completion([6] * 4)],
            [score(0.0, exact=0.0, format=0.0)] * 3,
            row=1,
        ),
    ]
    metrics = reward_metrics(groups)
    # 1, 1/2, 0, 0, 0
    assert metrics.pop("reward/std") == pytest.approx(np.sqrt(1.25 / 5 - 0.09))
    assert metrics == {
        "reward/mean": pytest.approx(0.3),
        "reward/failed": pytest.approx(1 / 6),
        "reward/useful_groups": 0.5,
        "reward/part/exact": pytest.approx(1 / 5),
        "reward/part/format": pytest.approx(2 / 6),
        "reward/spread/exact": pytest.approx(np.sqrt(1 / 5 - 1 / 25)),
        "reward/spread/format": pytest.approx(np.sqrt(2 / 6 - 4 / 36)),
        "completion/length": 3.0,
        "completion/length_max": 4.0,
        "completion/truncated": pytest.approx(1 / 6),
    }


def test_failed_scores_do_not_spoil_the_mean_reward():
    # G3-45
    metrics = reward_metrics([scored_group([7], [completion([1])] * 5, [0.2, NAN, 0.4, NAN, 0.9])])
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/failed"] == pytest.approx(2 / 5)


@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.1] * 8, [0.5, NAN, 0.5]])
def test_groups_of_equal_rewards_are_counted_as_useless(rewards):
    # G3-01
    groups = [
        scored_group([7], [completion([1])] * len(rewards), rewards),
        scored_group([8], [completion([1])] * 2, [0.0, 1.0], row=1),
    ]
    assert reward_metrics(groups)["reward/useful_groups"] == 0.5


def test_metrics_without_any_score_are_not_numbers():
    metrics = reward_metrics([scored_group([7], [completion([1])] * 2, [NAN, NAN])])
    assert metrics["reward/failed"] == 1.0
    assert metrics["reward/useful_groups"] == 0.0
    assert all(
        np.isnan(metrics[name]) for name in ("reward/mean", "reward/std", "reward/part/exact", "reward/spread/exact")
    )


def test_a_truncated_completion_can_be_compared_with_and_not_trained_on():
    """G3-08. Masked in the numerator and in the denominator: of completions of 4 and 2 tokens 2 tokens are left."""
    cut = completion([1, 2, 3, 4], finish_reason=FinishReason.LENGTH)
    group = scored_group([7], [cut, completion([5, 6])], [0, 1])
    (kept,) = training_sequences([group], baseline="group", scale="none", masks_truncated=True)
    assert (kept.advantage, kept.member, len(kept.rollout_logprobs)) == (0.5, 1, 2)


def test_a_penalty_is_taken_off_the_reward_before_it_is_compared():
    group = scored_group([7], [completion([1]), completion([2])], [1, 0])
    sequences = training_sequences([group], baseline="group", scale="none", penalties={(0, 0): 0.5, (0, 1): -0.25})
    # rewards 0.5 and 0.25
    assert [sequence.advantage for sequence in sequences] == [0.125, -0.125]
