import math

import numpy as np
import pytest

from towline.trainer.reward_metrics import calibration_error, pair_accuracy, reliability, score_spread


def margin(probability):
    return math.log(probability / (1 - probability))


def test_accuracy_counts_a_tie_a_half():
    assert pair_accuracy([2, 1, 0, 5], [1, 1, 3, -2]) == pytest.approx(2.5 / 4)


def test_a_constant_head_is_right_half_the_time():
    assert pair_accuracy(np.ones(7), np.ones(7)) == 0.5


def test_no_pairs_and_failed_scores_have_no_accuracy():
    assert math.isnan(pair_accuracy([], []))
    assert math.isnan(pair_accuracy([1.0, math.nan], [0.0, 0.0]))
    assert math.isnan(calibration_error([], []))
    assert math.isnan(calibration_error([1.0, math.nan], [0.0, 0.0]))


def test_the_reliability_table_by_hand():
    """Margins with a chance of 0.6, 0.6, 0.3 (sure of the other at 0.7) and 0.95; five bins from 1/2 to 1."""
    chosen = [margin(0.6), margin(0.58), margin(0.3), margin(0.95)]
    table = reliability(chosen, np.zeros(4), num_bins=5)
    assert [each.low for each in table] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9])
    assert [each.high for each in table] == pytest.approx([0.6, 0.7, 0.8, 0.9, 1.0])
    assert sum(each.num_pairs for each in table) == 4
    last = table[-1]
    assert (last.num_pairs, last.accuracy) == (1, 1.0)
    assert last.confidence == pytest.approx(0.95)
    assert math.isnan(table[3].accuracy)


def test_calibration_by_hand():
    """Sure at 0.75 of four pairs and right in three: no error. Sure at 0.95 of two and right in one: 0.45, a third."""
    chosen = [margin(0.75)] * 3 + [-margin(0.75)] + [margin(0.95), -margin(0.95)]
    assert calibration_error(chosen, np.zeros(6)) == pytest.approx(0.45 / 3)


def test_who_tosses_a_coin_and_says_so_is_calibrated():
    assert calibration_error(np.zeros(8), np.zeros(8)) == 0.0
    table = reliability(np.zeros(8), np.zeros(8))
    assert (table[0].num_pairs, table[0].accuracy, table[0].confidence) == (8, 0.5, 0.5)


def test_scores_that_mean_what_they_say_are_calibrated_and_inflated_ones_are_not():
    rng = np.random.default_rng(0)
    margins = rng.normal(size=200_000) * 2
    is_right = rng.random(len(margins)) < 1 / (1 + np.exp(-np.abs(margins)))
    signed = np.where(is_right, np.abs(margins), -np.abs(margins))
    assert calibration_error(signed, np.zeros(len(signed))) < 0.005
    assert calibration_error(5 * signed, np.zeros(len(signed))) > 0.1


def test_a_confidence_at_an_edge_is_of_the_lower_bin():
    table = reliability([math.log(3)], [0.0], num_bins=2)
    assert (table[0].high, table[0].confidence, table[0].num_pairs) == (0.75, 0.75, 1)


def test_huge_margins_are_of_the_last_bin():
    table = reliability([1e4, -1e4], [0.0, 0.0])
    assert (table[-1].num_pairs, table[-1].confidence, table[-1].accuracy) == (2, 1.0, 0.5)


def test_the_spread_by_hand():
    spread = score_spread(np.arange(101))
    assert spread == pytest.approx(
        {"mean": 50, "std": np.arange(101).std(), "q05": 5, "q25": 25, "q50": 50, "q75": 75, "q95": 95}
    )


def test_no_scores_have_no_spread():
    assert all(math.isnan(value) for value in score_spread([]).values())
    assert score_spread([]).keys() == score_spread([1.0]).keys()
    assert all(math.isnan(value) for value in score_spread([1.0, math.nan]).values())
