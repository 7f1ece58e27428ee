"""Intervals for accuracies, for mean rewards, and for the difference of two accuracies on the same prompts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.3f} ({self.low:.3f} to {self.high:.3f})"


def accuracy_interval(num_right: int, num_prompts: int, z: float = _Z95) -> Interval:
    """Score interval of a proportion, 95 % by default.

    Args:
        z: half its width in standard deviations.

    Source: Wilson 1927, JASA 22, 209-212. It stays within [0, 1] and is right for few prompts and extreme rates.
    """
    if num_prompts < 1:
        raise ValueError("an accuracy needs at least one prompt")
    rate = num_right / num_prompts
    scale = 1 + z * z / num_prompts
    centre = (rate + z * z / (2 * num_prompts)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / num_prompts + z * z / (4 * num_prompts * num_prompts))
    return Interval(estimate=rate, low=max(0.0, centre - half), high=min(1.0, centre + half))


def mean_interval(groups: Sequence[Sequence[float]]) -> Interval | None:
    """95 % interval of the mean of all values; None with fewer than two groups that have any.

    Values of one group, such as the rewards of one prompt's completions, need not be independent of each other.
    Source: Liang & Zeger 1986, Biometrika 73, 13-22 (clustered standard error, here with the factor G / (G - 1)), which
    Miller 2024 (arXiv:2411.00640) recommends for evaluations. Values of groups of one that are all 0 or 1 are a
    proportion, and have its interval.
    """
    groups = [group for group in groups if group]
    values = [value for group in groups for value in group]
    if len(groups) < 2:
        return None
    if len(values) == len(groups) and set(values) <= {0.0, 1.0}:
        return accuracy_interval(round(sum(values)), len(values))
    return ratio_interval([math.fsum(group) for group in groups], [len(group) for group in groups])


def ratio_interval(sums: Sequence[float], sizes: Sequence[int]) -> Interval:
    """95 % interval of the mean of all values of all groups, from each group's sum and how many values it has.

    Source: as `mean_interval`. With sizes of 1 it is the usual interval of a mean.

    Raises:
        ValueError: fewer than two groups.
    """
    if len(sums) != len(sizes) or len(sums) < 2:
        raise ValueError(f"expected at least two groups, found {len(sums)} sums and {len(sizes)} sizes")
    num = sum(sizes)
    mean = math.fsum(sums) / num
    spread = math.fsum((total - size * mean) ** 2 for total, size in zip(sums, sizes, strict=True))
    half = _Z95 * math.sqrt(len(sums) / (len(sums) - 1) * spread) / num
    return Interval(estimate=mean, low=mean - half, high=mean + half)


def paired_difference(before: Sequence[bool], after: Sequence[bool]) -> Interval:
    """95 % interval of (accuracy after - accuracy before) on the same prompts, in the same order.

    Source: Bonett & Price 2012, J. Educ. Behav. Stat. 37, 479-488 (adjusted Wald). Prompts that did not change say
    nothing about the difference, which is why it is narrower than two separate intervals suggest.
    """
    if len(before) != len(after) or not before:
        raise ValueError(f"expected the same prompts twice, found {len(before)} and {len(after)}")
    num = len(before)
    gained = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    up, down = (gained + 1) / (num + 2), (lost + 1) / (num + 2)
    half = _Z95 * math.sqrt((up + down - (up - down) ** 2) / (num + 2))
    return Interval(estimate=(gained - lost) / num, low=max(-1.0, up - down - half), high=min(1.0, up - down + half))
