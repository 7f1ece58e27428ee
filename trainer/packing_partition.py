"""Dividing weighted items into parts: best fit to a budget, and the differencing method for parts of like weight.

Weights are integers, so that sums are exact and every rank finds the same parts; ties go to the lower index.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import count
from operator import itemgetter

_Part = tuple[int, list[int]]
"""Its weight and the indices of its items."""

_WEIGHT = itemgetter(0)

FEW = 8
"""Parts that are put in their places one by one rather than by sorting all."""


def best_fit(weights: Sequence[int], budget: int) -> list[list[int]]:
    """Put each item, heaviest first, where it leaves the least room, or into a new part; one over the budget alone.

    Best fit decreasing: at most 11/9 of the fewest parts, plus one (Johnson 1973).
    """
    parts: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """(room, part), ascending."""
    for index in heaviest_first(weights):
        place = bisect_left(room, (weights[index], 0))
        if place < len(room):
            left, number = room.pop(place)
        else:
            left, number = budget, len(parts)
            parts.append([])
        parts[number].append(index)
        insort(room, (left - weights[index], number))
    return parts


def most_even(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide into parts of like weight by largest differencing; parts may be empty if items are few.

    The two partial divisions whose parts differ most become one, the heaviest part of the one with the lightest of the
    other, until one division is left (Karmarkar and Karp 1982). Its largest part exceeds the mean far less than that of
    the greedy rule.
    """
    singles = [[(weights[index], [index])] for index in heaviest_first(weights)]
    return _differenced(singles, num_parts)


def most_even_rounds(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """The same for parts of equally many items, in order of weight: the m-th items of all parts are of like weight.

    Items are taken in rounds, the heaviest `num_parts` first, of which each part gets one; rounds are joined as in
    `most_even` (balanced largest differencing: Yakir 1996; Michiels, Korst, Aarts 2003).

    Args:
        weights: a multiple of `num_parts`.
    """
    assert len(weights) % num_parts == 0, f"found {len(weights)} items, need a multiple of {num_parts}"
    order = heaviest_first(weights)
    rounds = [order[start : start + num_parts] for start in range(0, len(order), num_parts)]
    ascending = [[(weights[index], [index]) for index in reversed(members)] for members in rounds]
    place = {index: number for number, index in enumerate(order)}
    parts = [sorted(part, key=place.__getitem__) for part in _differenced(ascending, num_parts)]
    return sorted(parts, key=lambda part: [place[index] for index in part])


def heaviest_first(weights: Sequence[int]) -> list[int]:
    return sorted(range(len(weights)), key=lambda index: (-weights[index], index))


def _differenced(divisions: list[list[_Part]], num_parts: int) -> list[list[int]]:
    """Join divisions (parts in ascending order, empty ones left out) until one is left; give the items of its parts."""
    numbers = count()
    heap = [(-_spread(parts, num_parts), next(numbers), parts) for parts in divisions]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        joined = _joined(first, second, num_parts)
        heapq.heappush(heap, (-_spread(joined, num_parts), next(numbers), joined))
    parts = [items for _, items in heap[0][2]] if heap else []
    return parts + [[] for _ in range(num_parts - len(parts))]


def _spread(parts: list[_Part], num_parts: int) -> int:
    return parts[-1][0] - (parts[0][0] if len(parts) == num_parts else 0)


def _joined(first: list[_Part], second: list[_Part], num_parts: int) -> list[_Part]:
    """The lightest parts of each with the heaviest of the other; those that are left over stay alone."""
    shorter, longer = sorted((first, second), key=len)
    overlap = max(0, len(first) + len(second) - num_parts)
    pairs = zip(shorter[:overlap], reversed(longer[:overlap]), strict=True)
    parts, new = longer[overlap:], shorter[overlap:]
    new += [(one + other, items + others) for (one, items), (other, others) in pairs]
    # Mostly one item joins hundreds of parts.
    if len(new) > FEW:
        return sorted(parts + new, key=_WEIGHT)
    for part in new:
        insort(parts, part, key=_WEIGHT)
    return parts
