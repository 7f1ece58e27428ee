import math

import pytest

from towline.rollout.rewards.config import Convergence
from towline.rollout.rewards.convergence import has_converged

RULE = Convergence(min_reward=0.75, window=2, tolerance=0.125)


@pytest.mark.parametrize(
    ("means", "expected"),
    [
        ([], False),
        ([1.0, 1.0, 1.0], False),
        ([1.0, 1.0, 1.0, 1.0], True),
        ([0.75, 0.75, 0.75, 0.75], True),
        ([0.75, 0.75, 0.75, 0.625], False),
        ([0.0, 0.0, 0.0, 0.0], False),
        ([0.875, 0.875, 0.75, 1.0], True),
        ([0.75, 0.75, 0.75, 1.0], False),  # by 0.125, which is not less
        ([1.0, 1.0, 0.75, 1.0], False),
        ([1.0, 1.0, 0.875, 1.0], True),
        ([0.0, 0.0, 1.0, 1.0, 1.0, 1.0], True),
        ([1.0, 1.0, 1.0, 1.0, 0.0, 1.0], False),
        ([1.0, 1.0, 1.0, math.nan], False),
        ([math.nan, 1.0, 1.0, 1.0], False),
        ([math.nan, 1.0, 1.0, 1.0, 1.0], True),
    ],
)
def test_two_windows_that_are_high_and_alike_have_converged(means: list[float], expected: bool) -> None:
    assert has_converged(means, RULE) is expected
