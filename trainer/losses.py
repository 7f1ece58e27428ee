"""The policy loss and how it is measured: pure functions of tensors.

No model, no config object, no collective. Every loss is minimised. Every log-prob is natural, <= 0 and at the sampling
temperature. exp and log are computed in float32, or in float64 if that is what came in.

T = loss tokens of one micro-batch, the completions laid end to end, without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from towline.trainer.kl import MAX_LOG_RATIO, importance_ratio, kl_k2, kl_k3, kl_k3_unbiased

Surrogate = Literal["clipped", "cispo"]
RatioLevel = Literal["token", "sequence"]
KLEstimator = Literal["k2", "k3", "k3_unbiased"]


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
    surrogate: Surrogate = "clipped",
    ratio_level: RatioLevel = "token",
    lengths: Sequence[int] | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    correction_T: Tensor | None = None,
    reference_logprobs_T: Tensor | None = None,
    kl_beta: float = 0.0,
    kl_estimator: KLEstimator = "k3",
) -> LossOutput:
    """Sum of the policy-gradient loss and the KL penalty over the tokens.

    loss = sum_t w_t [ c_t surrogate_t + kl_beta KL_t ], with r = exp(policy - old) and, for "sequence", the same r for
    each token of a completion: exp of the mean of its log-ratios.

    - "clipped": -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7),
      with the KL of GRPO (Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4); unequal clips as in DAPO (Yu et al. 2025,
      arXiv:2503.14476, eq. 8); at sequence level GSPO (Zheng et al. 2025, arXiv:2507.18071, eq. 5 and 7).
    - "cispo": -stop_gradient(clip(r)) A policy. No token loses its gradient, its weight is bounded instead. MiniMax-M1
      (Chen et al. 2025, arXiv:2506.13585, section 3.1).

    Normaliser: none in here. `loss_weights_T` carries it, see `normaliser.token_weights`; so the sum over any split
    into micro-batches and ranks is the same. (An engine that averages gradients over ranks needs that undone by its
    caller.)
    Gradient: through the policy alone; old, reference, advantages, correction and weights are detached.

    Args:
        policy_logprobs_T: of the policy being trained.
        old_logprobs_T: of the policy that the ratio is taken against.
        advantages_T: the completion's advantage, once for each of its tokens.
        loss_weights_T: mask and normaliser in one; 0 leaves a token out, whatever else stands there.
        lengths: tokens of each completion, in order; for "sequence" only.
        correction_T: factor of the surrogate, see `engine_correction`; not of the KL.
        reference_logprobs_T: needed for `kl_beta` > 0; with `kl_beta` = 0 only measured.

    Returns:
        The loss, and the sums `tokens`, `ratio`, `clipped` (tokens whose gradient the clip took away; for "cispo",
        whose weight it changed) and, given a reference, `kl_k3`.
    """
    assert kl_beta == 0 or reference_logprobs_T is not None, "kl_beta > 0 needs reference_logprobs_T"
    assert (ratio_level == "sequence") == (lengths is not None), "`lengths` belong to ratio_level 'sequence'"
    weights_T = loss_weights_T.detach()
    is_loss_T = weights_T != 0

    def at_loss_tokens(values_T: Tensor) -> Tensor:
        return _zero_unless(is_loss_T, values_T)

    policy_T = at_loss_tokens(policy_logprobs_T)
    old_T = at_loss_tokens(old_logprobs_T.detach())
    advantages_T = at_loss_tokens(advantages_T.detach())
    ratio_T = importance_ratio(policy_T, old_T) if lengths is None else sequence_ratio(policy_T, old_T, lengths)
    clipped_ratio_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    if surrogate == "clipped":
        token_loss_T = -torch.minimum(ratio_T * advantages_T, clipped_ratio_T * advantages_T)
        is_clipped_T = (clipped_ratio_T - ratio_T) * advantages_T < 0
    else:
        token_loss_T = -clipped_ratio_T.detach() * advantages_T * policy_T
        is_clipped_T = clipped_ratio_T != ratio_T
    if correction_T is not None:
        token_loss_T = at_loss_tokens(correction_T.detach()) * token_loss_T
    sums = {"tokens": is_loss_T, "ratio": ratio_T * is_loss_T, "clipped": is_clipped_T & is_loss_T}

    if reference_logprobs_T is not None:
        reference_T = at_loss_tokens(reference_logprobs_T.detach())
        sums["kl_k3"] = kl_k3(policy_T.detach(), reference_T)
        # Not 0 * KL: an infinite reference that is only watched must not turn the loss into NaN.
        if kl_beta != 0:
            token_loss_T = token_loss_T + kl_beta * _kl(kl_estimator, policy_T, reference_T, old_T)
    return LossOutput(
        loss=(weights_T * token_loss_T).sum(),
        sums={name: values_T.detach().sum(dtype=torch.float64) for name, values_T in sums.items()},
    )


def sequence_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """exp of the mean log-ratio of each completion, once for each of its tokens: GSPO (arXiv:2507.18071, eq. 7).

    Args:
        lengths: tokens of each completion, in order; they add up to T.
    """
    assert sum(lengths) == len(policy_logprobs_T), f"{sum(lengths)} tokens in lengths, {len(policy_logprobs_T)} given"
    completion_T = torch.repeat_interleave(
        torch.arange(len(lengths), device=policy_logprobs_T.device),
        torch.tensor(lengths, dtype=torch.int64, device=policy_logprobs_T.device),
    )
    log_ratio_T = policy_logprobs_T - old_logprobs_T
    sums_C = log_ratio_T.new_zeros(len(lengths)).index_add(0, completion_T, log_ratio_T)
    counts_C = torch.tensor(lengths, dtype=log_ratio_T.dtype, device=log_ratio_T.device).clamp(min=1)
    return torch.exp((sums_C / counts_C).clamp(max=MAX_LOG_RATIO))[completion_T]


def engine_correction(old_logprobs_T: Tensor, rollout_logprobs_T: Tensor, *, low: float | None, high: float) -> Tensor:
    """Weight of each token for tokens that the engine sampled and the trainer recomputed: exp(old - rollout), bounded.

    Without `low` it is truncated, min(weight, high): TIS (Yao et al. 2025, "Your efficient RL framework secretly brings
    you off-policy RL training"). With `low` a token outside [low, high] gets 0: IcePop (Ling team 2025, "Small leak can
    sink a great ship"). NaN stays NaN.
    """
    weight_T = importance_ratio(old_logprobs_T, rollout_logprobs_T)
    if low is None:
        return weight_T.clamp(max=high)
    # Asked this way round, since a comparison with NaN is false: what is broken must not count as masked.
    return torch.where((weight_T < low) | (weight_T > high), torch.zeros_like(weight_T), weight_T)


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


def _kl(estimator: KLEstimator, policy_T: Tensor, reference_T: Tensor, old_T: Tensor) -> Tensor:
    if estimator == "k3_unbiased":
        return kl_k3_unbiased(policy_T, reference_T, old_T)
    return kl_k2(policy_T, reference_T) if estimator == "k2" else kl_k3(policy_T, reference_T)


def _zero_unless(mask_T: Tensor, values_T: Tensor) -> Tensor:
    """Float32 (or float64) values where the mask is true, else 0 with a zero gradient, even at NaN."""
    assert mask_T.dim() == 1, f"expected one value for each token, found shape {tuple(mask_T.shape)}"
    assert mask_T.shape == values_T.shape, f"expected shape {tuple(mask_T.shape)}, found {tuple(values_T.shape)}"
    values_T = values_T.to(torch.promote_types(values_T.dtype, torch.float32))
    return torch.where(mask_T, values_T, torch.zeros_like(values_T))
