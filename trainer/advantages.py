"""Advantages of the completions of one prompt, from their task rewards.

Computed on read by the trainer, one group at a time: prompts of different reward scales never meet. G = completions of
the group.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from towline.storage.errors import NumericsError


def group_advantages(
    rewards: NDArray[np.float64], *, scale: Literal["std", "none"] = "std", epsilon: float = 1e-6
) -> NDArray[np.float64] | None:
    """Compare each completion with the others of its group.

    A = (r - mean) / (std + epsilon), the population std: GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).
    `scale = "none"` leaves the division out: Dr. GRPO (Liu et al. 2025, arXiv:2503.20783). Better than the mean is > 0.

    A failed score is NaN. It takes no part in mean and std and its advantage is 0, which alone would still count its
    tokens in the normaliser and in the KL term: **the caller must mask them** (`losses.token_weights(masked=...)`).

    Args:
        rewards: [G], NaN where the score failed.
        epsilon: added to the std, in units of the reward.

    Returns:
        [G]; exactly 0 for equal rewards; None if fewer than two completions have a score: the group is dropped.

    Raises:
        NumericsError: a reward is infinite.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    _refuse_infinite(rewards)
    is_scored = ~np.isnan(rewards)
    scored = rewards[is_scored]
    if len(scored) < 2:
        return None
    advantages = np.zeros_like(rewards)
    # The mean of equal rewards that are not exact in binary (0.1 three times) differs from them in the last bit, and a
    # small epsilon blows that up. Equality of the rewards is what is meant, so that is what is asked.
    if np.all(scored == scored[0]):
        return advantages
    centred = scored - scored.mean()
    advantages[is_scored] = centred / (scored.std() + epsilon) if scale == "std" else centred
    return advantages


def _refuse_infinite(rewards: NDArray[np.float64]) -> None:
    infinite = np.flatnonzero(np.isinf(rewards))
    if len(infinite):
        index = int(infinite[0])
        raise NumericsError(
            f"the reward of completion {index} of its group is {rewards[index]}, expected a finite number; "
            "a score that could not be computed must be NaN with the status FAILED: mend the reward function"
        )
