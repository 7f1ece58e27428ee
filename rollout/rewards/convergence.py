"""When a task reward has converged, so that a reward for length may join it."""

import math
from collections.abc import Sequence

from towline.rollout.rewards.config import Convergence


def has_converged(means: Sequence[float], rule: Convergence) -> bool:
    """Whether the last `window` steps have a mean reward of at least `min_reward`, and less than `tolerance` from that
    of as many steps before.

    Before that, a penalty on length is an easier way to reward than the task. Kimi k1.5 (Kimi Team 2025,
    arXiv:2501.12599, section 2.3.3) found that it slows the beginning, and trains without it first. The level is part
    of the rule because the reward of a policy that has learnt nothing yet stands still as well.

    Args:
        means: mean reward of each step so far, in order, without that for length; NaN where nothing was scored.
    """
    if len(means) < 2 * rule.window:
        return False
    before, last = (
        math.fsum(window) / rule.window for window in (means[-2 * rule.window : -rule.window], means[-rule.window :])
    )
    return last >= rule.min_reward and abs(last - before) < rule.tolerance
