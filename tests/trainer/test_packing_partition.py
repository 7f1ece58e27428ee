from itertools import chain

import numpy as np
import pytest

from towline.trainer.packing_partition import best_fit, heaviest_first, most_even, most_even_rounds


def sums(parts, weights):
    return [sum(weights[index] for index in part) for part in parts]


def random_weights(seed, count=60, high=1000):
    return np.random.default_rng(seed).integers(1, high, count).tolist()


def test_heaviest_come_first_and_equals_by_index():
    assert heaviest_first([2, 5, 2, 9]) == [3, 1, 0, 2]


def test_best_fit_puts_each_where_it_leaves_least_room():
    # 6 | 5 | 4 beside 6, where nothing is left, and not beside 5 | 3 and 2 beside 5
    assert best_fit([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert best_fit([], 10) == []


def test_best_fit_gives_an_item_over_the_budget_a_part_of_its_own():
    assert best_fit([12, 4, 20], 10) == [[2], [0], [1]]
    assert best_fit([3, 2], 0) == [[0], [1]]


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_equals_its_definition(seed):
    weights, parts, room = random_weights(seed), [], []
    for index in heaviest_first(weights):
        fitting = [number for number in range(len(parts)) if room[number] >= weights[index]]
        if not fitting:
            parts.append([])
            room.append(1500)
        best = min(fitting, key=lambda number: (room[number], number)) if fitting else len(parts) - 1
        parts[best].append(index)
        room[best] -= weights[index]
    assert best_fit(weights, 1500) == parts


def test_differencing_by_hand():
    # 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2, where the greedy rule leaves 4
    weights = [8, 7, 6, 5, 4]
    assert sorted(sums(most_even(weights, 2), weights)) == [14, 16]
    assert sorted(greedy(weights, 2)) == [13, 17]


@pytest.mark.parametrize("num_parts", [1, 2, 8, 60, 75])
@pytest.mark.parametrize("seed", range(3))
def test_every_item_is_in_one_part(num_parts, seed):
    parts = most_even(random_weights(seed), num_parts)
    assert len(parts) == num_parts
    assert sorted(chain.from_iterable(parts)) == list(range(60))
    assert sum(map(bool, parts)) == min(num_parts, 60)
    assert parts == most_even(random_weights(seed), num_parts)


def greedy(weights, num_parts):
    load = [0] * num_parts
    for index in heaviest_first(weights):
        load[load.index(min(load))] += weights[index]
    return load


def test_differencing_is_far_more_even_than_the_greedy_rule():
    excess = []
    for seed in range(20):
        weights = random_weights(seed, count=100)
        mean = sum(weights) / 8
        excess.append([max(sums(most_even(weights, 8), weights)) / mean - 1, max(greedy(weights, 8)) / mean - 1])
    differencing, other = np.mean(excess, 0)
    assert differencing < other / 5
    assert np.max(excess, 0)[0] < 0.002


@pytest.mark.parametrize("num_parts", [1, 2, 4, 12])
@pytest.mark.parametrize("seed", range(5))
def test_rounds_give_each_part_one_item_of_each(num_parts, seed):
    weights = random_weights(seed)
    parts = most_even_rounds(weights, num_parts)
    order = heaviest_first(weights)
    rounds = [set(order[start : start + num_parts]) for start in range(0, 60, num_parts)]
    assert [set(members) for members in zip(*parts, strict=True)] == rounds


def test_rounds_by_hand():
    # 9 8 | 7 3 | 2 1: differences 1, 4 and 1; 4 - 1 = 3, then 3 - 1 = 2
    weights = [9, 8, 7, 3, 2, 1]
    parts = most_even_rounds(weights, 2)
    assert sums(parts, weights) == [14, 16]
    assert parts == [[0, 3, 4], [1, 2, 5]]


def test_rounds_of_nothing_and_of_other_numbers():
    assert most_even_rounds([], 3) == [[], [], []]
    with pytest.raises(AssertionError, match="multiple of 2"):
        most_even_rounds([1, 2, 3], 2)
