"""Advantages of completions from their task rewards.

Computed on read by the trainer, from all groups of a step. Unless it is asked for by name, prompts of different reward
scales never meet. G = completions of a group.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from towline.storage.errors import NumericsError

Baseline = Literal["group", "leave_one_out", "batch"]
Scale = Literal["std", "batch_std", "none"]
EPSILON = 1e-6


def step_advantages(
    groups: Sequence[NDArray[np.float64]],
    *,
    baseline: Baseline = "group",
    scale: Scale = "std",
    epsilon: float = EPSILON,
) -> list[NDArray[np.float64] | None]:
    """Compare each completion with others: A = (r - baseline) / (spread + epsilon). Better than the baseline is > 0.

    Baselines:
    - "group": the group's mean. GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2).
    - "leave_one_out": the mean of the others of the group. RLOO (Ahmadian et al. 2024, arXiv:2402.14740).
    - "batch": the mean of all completions of the step. REINFORCE++ (Hu 2025, arXiv:2501.03262).

    Spreads, population standard deviations:
    - "std": of the group. GRPO.
    - "batch_std": of r - baseline over the step. REINFORCE++; with "group" its variant with a baseline.
    - "none": 1, without epsilon. Dr. GRPO (Liu et al. 2025, arXiv:2503.20783), RLOO.

    A failed score is NaN. It takes no part in mean and spread and its advantage is 0, which alone would still count its
    tokens in the normaliser and in the KL term: **the caller must mask them** (`normaliser.token_weights(masked=...)`).

    Args:
        groups: [G] rewards of each group, NaN where the score failed.
        epsilon: added to the standard deviation, in units of the reward.

    Returns:
        [G] of each group; exactly 0 where what is compared is equal; None for a group with fewer than two scores, which
        is dropped and takes no part in the others'.

    Raises:
        NumericsError: a reward is infinite.
    """
    rewards = [np.asarray(group, dtype=np.float64) for group in groups]
    for group in rewards:
        _refuse_infinite(group)
    scored = [group[~np.isnan(group)] for group in rewards]
    kept = [group for group in scored if len(group) >= 2]
    if not kept:
        return [None] * len(rewards)
    everything = np.concatenate(kept)
    centred = [_centred(group, everything, baseline) if len(group) >= 2 else None for group in scored]
    batch_std = float(np.concatenate([group for group in centred if group is not None]).std())
    advantages: list[NDArray[np.float64] | None] = []
    for group, values in zip(rewards, centred, strict=True):
        if values is None:
            advantages.append(None)
            continue
        spread = {"std": float(values.std()) + epsilon, "batch_std": batch_std + epsilon, "none": 1.0}[scale]
        whole = np.zeros_like(group)
        whole[~np.isnan(group)] = values / spread
        advantages.append(whole)
    return advantages


def _centred(scored: NDArray[np.float64], everything: NDArray[np.float64], baseline: Baseline) -> NDArray[np.float64]:
    compared = everything if baseline == "batch" else scored
    # The mean of equal rewards that are not exact in binary (0.1 three times) differs from them in the last bit, and a
    # small epsilon blows that up. Equality of the rewards is what is meant, so that is what is asked.
    if np.all(compared == compared[0]):
        return np.zeros_like(scored)
    if baseline == "leave_one_out":
        return scored - (scored.sum() - scored) / (len(scored) - 1)
    return scored - compared.mean()


def _refuse_infinite(rewards: NDArray[np.float64]) -> None:
    infinite = np.flatnonzero(np.isinf(rewards))
    if len(infinite):
        index = int(infinite[0])
        raise NumericsError(
            f"the reward of completion {index} of its group is {rewards[index]}, expected a finite number; "
            "a score that could not be computed must be NaN with the status FAILED: mend the reward function"
        )
