"""The policy loss, its KL terms and its normaliser: pure functions of tensors.

No model, no config object, no collective. Every loss is minimised. Every log-prob is natural, <= 0 and at the sampling
temperature. exp and log are computed in float32, or in float64 if that is what came in.

T = loss tokens of one micro-batch, the completions laid end to end, without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp: e^20 = 5e8 is far outside every clip, yet finite in float32 with its gradient.

Only from above. From below exp goes to 0 by itself, and a cut would take away a gradient that is right. NaN passes."""

Normaliser = Literal["tokens", "sequence", "constant"]
KLEstimator = Literal["k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    loss: Tensor
    """Scalar, connected to the policy even if no token carries weight: its backward then gives zeros, not an error."""
    sums: dict[str, Tensor]
    """Detached float64 scalars, unweighted, over tokens of non-zero weight. Add them over micro-batches and ranks, then
    divide by `tokens`."""


def policy_loss(
    policy_logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
    loss_weights_T: Tensor,
    *,
    reference_logprobs_T: Tensor | None = None,
    kl_beta: float = 0.0,
    kl_estimator: KLEstimator = "k3",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> LossOutput:
    """Sum of the clipped policy-gradient loss and the KL penalty over the tokens.

    loss = sum_t w_t [ -min(ratio_t A_t, clip(ratio_t, 1 - clip_low, 1 + clip_high) A_t) + kl_beta KL_t ],
    ratio_t = exp(policy_t - old_t).

    Source: PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with the KL of GRPO (Shao et al. 2024, arXiv:2402.03300,
    eq. 3 and 4); unequal clips as in DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 8).
    Normaliser: none in here. `loss_weights_T` carries it, see `token_weights`; so the sum over any split into
    micro-batches and ranks is the same. (An engine that averages gradients over ranks needs that undone by its caller.)
    Gradient: through the policy alone; old, reference, advantages and weights are detached.

    Args:
        policy_logprobs_T: of the policy being trained.
        old_logprobs_T: of the policy that the ratio is taken against.
        advantages_T: the completion's advantage, once for each of its tokens.
        loss_weights_T: mask and normaliser in one; 0 leaves a token out, whatever else stands there.
        reference_logprobs_T: needed for `kl_beta` > 0; with `kl_beta` = 0 only measured.

    Returns:
        The loss, and the sums `tokens`, `ratio`, `clipped` (tokens whose gradient the clip took away) and, given a
        reference, `kl_k3`.
    """
    assert kl_beta == 0 or reference_logprobs_T is not None, "kl_beta > 0 needs reference_logprobs_T"
    weights_T = loss_weights_T.detach()
    is_loss_T = weights_T != 0

    def at_loss_tokens(values_T: Tensor) -> Tensor:
        return _zero_unless(is_loss_T, values_T)

    policy_T = at_loss_tokens(policy_logprobs_T)
    advantages_T = at_loss_tokens(advantages_T.detach())
    ratio_T = importance_ratio(policy_T, at_loss_tokens(old_logprobs_T.detach()))
    clipped_ratio_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    token_loss_T = -torch.minimum(ratio_T * advantages_T, clipped_ratio_T * advantages_T)
    is_clipped_T = (clipped_ratio_T - ratio_T) * advantages_T < 0
    sums = {"tokens": is_loss_T, "ratio": ratio_T * is_loss_T, "clipped": is_clipped_T}

    if reference_logprobs_T is not None:
        reference_T = at_loss_tokens(reference_logprobs_T.detach())
        sums["kl_k3"] = kl_k3(policy_T.detach(), reference_T)
        # Not 0 * KL: an infinite reference that is only watched must not turn the loss into NaN.
        if kl_beta != 0:
            token_loss_T = token_loss_T + kl_beta * KL_ESTIMATORS[kl_estimator](policy_T, reference_T)
    return LossOutput(
        loss=(weights_T * token_loss_T).sum(),
        sums={name: values_T.detach().sum(dtype=torch.float64) for name, values_T in sums.items()},
    )


def importance_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """exp(policy - old), with `MAX_LOG_RATIO`."""
    return torch.exp((policy_logprobs_T - old_logprobs_T).clamp(max=MAX_LOG_RATIO))


def kl_k2(sampled_logprobs_T: Tensor, other_logprobs_T: Tensor) -> Tensor:
    """(sampled - other)^2 / 2 for each token: biased in value, right in gradient.

    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. Under tokens of
    `sampled` the expected gradient is that of KL(sampled || other).
    """
    return (sampled_logprobs_T - other_logprobs_T).square() / 2


def kl_k3(sampled_logprobs_T: Tensor, other_logprobs_T: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = other - sampled, for each token: >= 0, right in value.

    Source: GRPO (arXiv:2402.03300, eq. 4); Schulman 2020 as above. Under tokens of `sampled` the expected value is
    KL(sampled || other), the expected gradient that of the forward divergence KL(other || sampled). Past
    `MAX_LOG_RATIO` the whole term is constant: cut inside exp alone, its gradient would push the wrong way.
    """
    difference_T = (other_logprobs_T - sampled_logprobs_T).clamp(max=MAX_LOG_RATIO)
    # expm1 and not exp - 1: near d = 0, where training lives, the difference of near-equal numbers is all rounding.
    return torch.expm1(difference_T) - difference_T


KL_ESTIMATORS = {"k2": kl_k2, "k3": kl_k3}


def mismatch(policy_logprobs_T: Tensor, rollout_logprobs_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
    """Measure how far the trainer's log-probs are from the engine's, for the same weights and tokens.

    Args:
        mask_T: bool, true for tokens whose version is the trainer's.

    Returns:
        The sum over the mask of k3 for KL(rollout || policy), float64, to be divided by the number of tokens once
        added up; and the largest |policy - rollout|, 0 for an empty mask.
    """
    policy_T = _zero_unless(mask_T, policy_logprobs_T.detach())
    rollout_T = _zero_unless(mask_T, rollout_logprobs_T.detach())
    distance_T = (policy_T - rollout_T).abs()
    largest = torch.cat((distance_T, distance_T.new_zeros(1))).max()
    return kl_k3(rollout_T, policy_T).sum(dtype=torch.float64), largest


def _zero_unless(mask_T: Tensor, values_T: Tensor) -> Tensor:
    """Float32 (or float64) values where the mask is true, else 0 with a zero gradient, even at NaN."""
    assert mask_T.dim() == 1, f"expected one value for each token, found shape {tuple(mask_T.shape)}"
    assert mask_T.shape == values_T.shape, f"expected shape {tuple(mask_T.shape)}, found {tuple(values_T.shape)}"
    values_T = values_T.to(torch.promote_types(values_T.dtype, torch.float32))
    return torch.where(mask_T, values_T, torch.zeros_like(values_T))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTotals:
    """What one optimiser step trains on. Count locally, add over ranks and accumulation, then make the weights."""

    tokens: int
    """Loss tokens."""
    completions: int
    """Completions with at least one loss token."""


def loss_totals(num_completion_tokens: Sequence[int], *, masked: Sequence[bool] | None = None) -> LossTotals:
    """Count what is trained on; a masked completion is in neither number."""
    kept = _kept_lengths(num_completion_tokens, masked)
    return LossTotals(tokens=sum(kept), completions=sum(length > 0 for length in kept))


def token_weights(
    num_completion_tokens: Sequence[int],
    normaliser: Normaliser,
    *,
    totals: LossTotals,
    constant: float | None = None,
    masked: Sequence[bool] | None = None,
) -> list[NDArray[np.float32]]:
    """Give each token of each completion its weight in the loss of the optimiser step.

    - "tokens": 1 / totals.tokens. Every token counts alike (DAPO, arXiv:2503.14476, eq. 8).
    - "sequence": 1 / (totals.completions x length). Every completion counts alike, so that tokens of long ones count
      less (GRPO, arXiv:2402.03300, eq. 3).
    - "constant": 1 / constant, independent of all lengths (Dr. GRPO, arXiv:2503.20783: number of completions of the
      step x `max_completion_tokens`).

    The weights of a whole step add up to 1 for the first two. Masked completions weigh 0 and are in no denominator; if
    all are masked, all weigh 0.

    Args:
        num_completion_tokens: of these completions, of this rank and any number of micro-batches.
        totals: of the whole optimiser step, over all ranks and accumulation.
        constant: for "constant" only.
        masked: true for a completion that must not be trained on (failed score, truncated, ...).
    """
    assert (normaliser == "constant") == (constant is not None), "`constant` belongs to the normaliser 'constant'"
    kept = _kept_lengths(num_completion_tokens, masked)
    weights: list[NDArray[np.float32]] = []
    for length, kept_length in zip(num_completion_tokens, kept, strict=True):
        if kept_length == 0:
            weight = 0.0
        elif normaliser == "tokens":
            weight = 1 / totals.tokens
        elif normaliser == "sequence":
            weight = 1 / (totals.completions * length)
        else:
            assert constant is not None
            weight = 1 / constant
        weights.append(np.full(length, weight, dtype=np.float32))
    return weights


def _kept_lengths(lengths: Sequence[int], masked: Sequence[bool] | None) -> list[int]:
    if masked is None:
        return list(lengths)
    return [0 if is_masked else length for length, is_masked in zip(lengths, masked, strict=True)]
