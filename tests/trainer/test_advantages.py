import numpy as np
import pytest

from towline.storage.errors import NumericsError
from towline.trainer.advantages import step_advantages

NAN, INF = float("nan"), float("inf")


def advantages(*rewards, **options):
    return step_advantages([np.array(rewards, dtype=np.float64)], **options)[0]


def test_one_success_in_four_by_hand():
    # mean 1/4, population std sqrt(3)/4
    root = np.sqrt(3)
    np.testing.assert_allclose(advantages(1, 0, 0, 0), [root, -root / 3, -root / 3, -root / 3], rtol=1e-5)


def test_without_scale_the_mean_alone_is_taken_off():
    np.testing.assert_array_equal(advantages(1, 0, 0, 0, scale="none"), [0.75, -0.25, -0.25, -0.25])


def test_epsilon_is_added_to_the_deviation():
    np.testing.assert_allclose(advantages(1, 0, epsilon=0.5), [0.5, -0.5], rtol=1e-15)


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("rewards", [[1] * 4, [0] * 4, [0.1] * 3, [0.1] * 8, [0.7] * 8, [-1e9 / 3] * 7])
def test_equal_rewards_give_exactly_zero(rewards, scale):
    # G3-01, G3-02: 0.1 three times has a mean that is not 0.1
    result = advantages(*rewards, scale=scale, epsilon=1e-20)
    np.testing.assert_array_equal(result, np.zeros(len(rewards)))


def test_equal_float32_rewards_give_exactly_zero():
    rewards = np.full(8, 0.1, dtype=np.float32)
    np.testing.assert_array_equal(step_advantages([rewards], epsilon=1e-8)[0], np.zeros(8))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, NAN, 0, 1], [0.70711, 0, -1.41421, 0.70711]),
        ([NAN, 0, 1, 1], [0, -1.41421, 0.70711, 0.70711]),
        ([NAN, 0.1, 0.1, 0.1], [0, 0, 0, 0]),
    ],
)
def test_a_failed_score_is_left_out_and_gets_zero(rewards, expected):
    # G3-04; which completions are masked, see test_rollout_batch
    np.testing.assert_allclose(advantages(*rewards), expected, atol=1e-5)


def test_none_is_a_failed_score_too():
    # G3-04
    np.testing.assert_array_equal(advantages(1, None, 0, 1), advantages(1, NAN, 0, 1))


@pytest.mark.parametrize("rewards", [[1], [NAN, NAN], [1, NAN], [NAN, NAN, 0.5]])
def test_fewer_than_two_scores_drop_the_group(rewards):
    assert advantages(*rewards) is None


@pytest.mark.parametrize(("rewards", "index"), [([INF, 0, 1, 1], 0), ([0, 1, -INF], 2), ([INF, NAN], 0)])
def test_an_infinite_reward_is_refused_by_index(rewards, index):
    # G3-06
    with pytest.raises(NumericsError, match=f"completion {index} "):
        advantages(*rewards)


def test_groups_of_other_scale_get_the_same_advantages():
    # G3-07
    np.testing.assert_allclose(advantages(1, 0), [1, -1], atol=1e-5)
    np.testing.assert_allclose(advantages(10, 0), [1, -1], atol=1e-5)


def test_advantages_are_float64_with_mean_zero_and_leave_the_rewards_alone():
    rewards = np.random.default_rng(0).normal(size=16)
    before = rewards.copy()
    result = step_advantages([rewards])[0]
    assert result.dtype == np.float64
    assert abs(result.mean()) < 1e-15
    assert result.std() == pytest.approx(1, abs=1e-5)
    np.testing.assert_array_equal(rewards, before)


# --- other baselines and spreads ---------------------------------------------------------------------------------


def step(*groups, **options):
    return step_advantages([np.array(group, dtype=np.float64) for group in groups], **options)


def test_leave_one_out_by_hand():
    # 1 - mean(0, 2), 0 - mean(1, 2), 2 - mean(1, 0)
    np.testing.assert_allclose(step([1, 0, 2], baseline="leave_one_out", scale="none")[0], [0, -1.5, 1.5])


@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [0.3, 0.9, 0.1], [5, -2]])
def test_leave_one_out_is_the_centred_reward_times_g_over_g_minus_1(rewards):
    size = len(rewards)
    rloo = step(rewards, baseline="leave_one_out", scale="none")[0]
    centred = step(rewards, scale="none")[0]
    np.testing.assert_allclose(rloo, size / (size - 1) * centred, rtol=1e-12)


def test_a_batch_baseline_compares_over_the_step():
    # mean of 1, 0, 3, 0 is 1; deviations 0, -1, 2, -1 with a spread of sqrt(6 / 4)
    first, second = step([1, 0], [3, 0], baseline="batch", scale="batch_std", epsilon=0.0)
    np.testing.assert_allclose(np.concatenate([first, second]), np.array([0, -1, 2, -1]) / np.sqrt(1.5))


def test_a_batch_spread_with_the_groups_own_baselines():
    # deviations 0.5, -0.5, 1.5, -1.5 with a spread of sqrt(5 / 4)
    first, second = step([1, 0], [3, 0], baseline="group", scale="batch_std", epsilon=0.0)
    np.testing.assert_allclose(np.concatenate([first, second]), np.array([0.5, -0.5, 1.5, -1.5]) / np.sqrt(1.25))


@pytest.mark.parametrize("baseline", ["group", "leave_one_out", "batch"])
@pytest.mark.parametrize("scale", ["std", "batch_std", "none"])
def test_equal_rewards_in_all_groups_give_exactly_zero_whatever_the_parts(baseline, scale):
    for advantages in step([0.1] * 3, [0.1] * 5, baseline=baseline, scale=scale):
        assert (advantages == 0).all()


def test_a_dropped_group_takes_no_part_in_the_others():
    alone = step([1, 0], baseline="batch", scale="batch_std")
    with_dropped = step([1, 0], [NAN, 100.0], baseline="batch", scale="batch_std")
    np.testing.assert_array_equal(with_dropped[0], alone[0])
    assert with_dropped[1] is None


@pytest.mark.parametrize(
    ("baseline", "scale"), [("group", "std"), ("group", "batch_std"), ("leave_one_out", "none"), ("batch", "batch_std")]
)
def test_the_order_of_groups_and_of_their_completions_does_not_matter(baseline, scale):
    rng = np.random.default_rng(0)
    groups = [rng.normal(size=size) for size in (8, 2, 5)]
    wanted = step_advantages(groups, baseline=baseline, scale=scale)
    orders = [rng.permutation(len(group)) for group in groups]
    places = [2, 0, 1]
    found = step_advantages([groups[place][orders[place]] for place in places], baseline=baseline, scale=scale)
    for place, advantages in zip(places, found, strict=True):
        np.testing.assert_allclose(advantages, wanted[place][orders[place]], rtol=1e-10)


def test_groups_of_other_scale_do_not_meet_by_default():
    first, second = step([1, 0], [10, 0], epsilon=0.0)
    np.testing.assert_allclose([first, second], [[1, -1], [1, -1]])
