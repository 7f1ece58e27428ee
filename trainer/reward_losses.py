"""Losses of reward models, of whole completions and of their steps, and how steps make one reward. Pure functions.

exp and log are computed in float32, or in float64 if that is what came in. Every loss is minimised.

P = pairs of one micro-batch, S = its steps.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

StepReduction = Literal["min", "product", "mean"]

IGNORED = -100
"""Label of a step that nobody judged."""


def pair_reward_loss(
    chosen_P: Tensor, rejected_P: Tensor, *, margins_P: Tensor | None = None, centring: float = 0.0
) -> Tensor:
    """Compare the scores of each pair: -log sigmoid(chosen - rejected - margin) + centring (chosen + rejected)^2.

    Bradley and Terry 1952, as in Ouyang et al. 2022, arXiv:2203.02155, eq. 1. Margins say how much better the chosen
    one is (Touvron et al. 2023, arXiv:2307.09288, eq. 2). The loss knows differences alone; centring draws the sum of
    scores towards 0 (Eisenstein et al. 2023, arXiv:2312.09244, section 2; TRL's center_rewards_coefficient).

    Returns:
        [P], to be divided by the pairs of the whole optimiser step.
    """
    chosen_P, rejected_P = _at_least_float32(chosen_P), _at_least_float32(rejected_P)
    assert chosen_P.shape == rejected_P.shape, f"{len(chosen_P)} chosen completions for {len(rejected_P)} rejected ones"
    difference_P = chosen_P - rejected_P
    if margins_P is not None:
        assert margins_P.shape == chosen_P.shape, f"{len(margins_P)} margins for {len(chosen_P)} pairs"
        difference_P = difference_P - margins_P
    losses_P = -logsigmoid(difference_P)
    return losses_P if centring == 0 else losses_P + centring * (chosen_P + rejected_P).square()


def step_label_loss(scores_S: Tensor, labels_S: Tensor, *, num_labelled: int) -> Tensor:
    """Cross entropy of sigmoid(score) with the labels of the steps that have one, as a share of the optimiser step's
    mean over such steps (process supervision: Lightman et al. 2023, arXiv:2305.20050).

    Args:
        labels_S: int64: 1 for a correct step, 0 for a wrong one, `IGNORED` for one without a label.
        num_labelled: steps with a label in the whole optimiser step, over all ranks and accumulation, >= 1.

    Returns:
        Scalar, connected to the scores even if no step has a label.
    """
    assert labels_S.dtype == torch.int64, f"labels are {labels_S.dtype}, expected int64: as bool, {IGNORED} is true"
    assert labels_S.shape == scores_S.shape, f"{len(labels_S)} labels for {len(scores_S)} steps"
    assert num_labelled >= 1, "no step of the optimiser step has a label, need one at least"
    is_labelled_S = labels_S != IGNORED
    assert bool(((labels_S == 0) | (labels_S == 1) | ~is_labelled_S).all()), f"a label is not 0, 1 or {IGNORED}"
    scores_S = _at_least_float32(scores_S)
    # Before the loss and not after it: a gradient of 0 times NaN would be NaN.
    scores_S = torch.where(is_labelled_S, scores_S, torch.zeros_like(scores_S))
    losses_S = binary_cross_entropy_with_logits(
        scores_S, torch.where(is_labelled_S, labels_S, 0).to(scores_S.dtype), reduction="none"
    )
    return (losses_S * is_labelled_S).sum() / num_labelled


def step_reward(scores: Sequence[float], how: StepReduction = "min") -> float:
    """Make one reward of the probabilities that each step is correct.

    "min" and "product" as in Lightman et al. 2023 (arXiv:2305.20050, appendix F); a product falls with the number of
    steps, a mean forgives a wrong one.

    Returns:
        NaN for no steps at all, as for any score that failed: neither 0 nor 1 would be true.
    """
    if not scores or any(map(math.isnan, scores)):
        return math.nan
    if how == "min":
        return min(scores)
    return math.prod(scores) if how == "product" else math.fsum(scores) / len(scores)


def _at_least_float32(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
