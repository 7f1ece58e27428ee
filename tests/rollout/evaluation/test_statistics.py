import pytest

from towline.rollout.evaluation.statistics import accuracy_interval, mean_interval, ratio_interval


def test_a_mean_of_single_values_has_the_interval_of_the_standard_error() -> None:
    """1, 2, 3, 6: mean 3, squared deviations 4 + 1 + 0 + 9 = 14, sample variance 14/3, standard error sqrt(14/3/4)."""
    interval = mean_interval([[1.0], [2.0], [3.0], [6.0]])
    assert interval is not None
    half = 1.959963984540054 * (14 / 3 / 4) ** 0.5
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((3.0, 3.0 - half, 3.0 + half), abs=1e-12)


def test_values_of_one_group_count_as_one_observation() -> None:
    """Each value four times: as wide as if each were there once, not half as wide."""
    single, fourfold = mean_interval([[1.0], [2.0], [6.0]]), mean_interval([[1.0] * 4, [2.0] * 4, [6.0] * 4])
    assert single is not None
    assert fourfold is not None
    assert (fourfold.low, fourfold.high) == pytest.approx((single.low, single.high), abs=1e-12)


def test_right_and_wrong_answers_have_the_interval_of_a_proportion() -> None:
    assert mean_interval([[1.0]] * 10) == accuracy_interval(10, 10)
    assert mean_interval([[1.0]] * 3 + [[0.0]] * 7) == accuracy_interval(3, 10)


@pytest.mark.parametrize("groups", [[], [[]], [[1.0, 0.0]], [[1.0], []]])
def test_fewer_than_two_groups_have_no_interval(groups: list[list[float]]) -> None:
    assert mean_interval(groups) is None


def test_a_mean_from_sums_and_sizes_by_hand() -> None:
    """Sums 3, 2, 7 of 1, 2 and 3 values: mean 2, residuals 1, -2, 1, so sqrt(3/2 x 6) / 6 = 1/2."""
    interval = ratio_interval([3.0, 2.0, 7.0], [1, 2, 3])
    half = 1.959963984540054 / 2
    assert (interval.estimate, interval.low, interval.high) == pytest.approx((2.0, 2.0 - half, 2.0 + half), abs=1e-12)


def test_a_mean_from_sums_and_sizes_is_that_of_the_values() -> None:
    groups = [[0.5, 1.5], [2.0], [0.25, 0.5, 4.0], [3.0, 3.0]]
    assert ratio_interval([sum(group) for group in groups], [len(group) for group in groups]) == mean_interval(groups)


@pytest.mark.parametrize(("sums", "sizes"), [([], []), ([3.0], [2]), ([1.0, 2.0], [1])])
def test_fewer_than_two_sums_have_no_interval(sums: list[float], sizes: list[int]) -> None:
    with pytest.raises(ValueError, match=f"found {len(sums)} sums and {len(sizes)} sizes"):
        ratio_interval(sums, sizes)
