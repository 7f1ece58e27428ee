"""Losses of pairs, a chosen and a rejected completion of one prompt: DPO and IPO. Pure functions of tensors.

A completion's log-prob is the sum over its tokens, natural, <= 0 and at temperature 1. exp and log are computed in
float32, or in float64 if that is what came in. Every loss is minimised; none is divided by the number of pairs here,
so that the sum over any split into micro-batches and ranks is the same.

P = pairs of one micro-batch, C = its completions, N = their tokens, laid end to end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

PreferenceKind = Literal["sigmoid", "ipo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceOutput:
    losses_P: Tensor
    """Differentiable in the policy alone."""
    chosen_rewards_P: Tensor
    """Implicit rewards, beta x log-ratio (for a token on average, if the loss takes it so); detached."""
    rejected_rewards_P: Tensor


def preference_loss(
    policy_chosen_P: Tensor,
    policy_rejected_P: Tensor,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    *,
    beta: float,
    kind: PreferenceKind = "sigmoid",
    is_length_normalised: bool = False,
    label_smoothing: float = 0.0,
    nll_weight: float = 0.0,
    chosen_tokens_P: Tensor | None = None,
    rejected_tokens_P: Tensor | None = None,
) -> PreferenceOutput:
    """Compare the log-ratios, policy - reference, of the two completions of each pair: delta = chosen - rejected.

    - "sigmoid": -log sigmoid(beta delta). DPO (Rafailov et al. 2023, arXiv:2305.18290, eq. 7). With `label_smoothing`
      s, the chance that a pair is the wrong way round: -(1 - s) log sigmoid(beta delta) - s log sigmoid(-beta delta)
      (conservative DPO, Mitchell 2023). Its gradient is 0 where sigmoid(beta delta) = 1 - s, and nowhere else: a half
      leads back to the reference's margin.
    - "ipo": (delta - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036, eq. 17, beta being its tau). TRL takes log-
      ratios for a token on average, as it was done for the paper's results: `is_length_normalised`.

    At the reference, delta = 0, "sigmoid" is ln 2 whatever the smoothing.

    To either `nll_weight` adds the chosen completion's negative log-likelihood a token (Pang et al. 2024,
    arXiv:2404.19733, eq. 1, of the completion alone; TRL's rpo_alpha).

    Args:
        policy_chosen_P, policy_rejected_P: sums over the completion's tokens, of the policy being trained.
        reference_chosen_P, reference_rejected_P: the same of the reference.
        beta: > 0.
        is_length_normalised: each log-ratio is divided by the number of the completion's tokens.
        label_smoothing: in [0, 1/2]; for "sigmoid" only.
        nll_weight: >= 0.
        chosen_tokens_P, rejected_tokens_P: numbers of tokens that were summed, >= 1; where lengths count only.
    """
    assert beta > 0, f"beta {beta}, expected > 0"
    assert 0 <= label_smoothing <= 0.5, f"label_smoothing {label_smoothing}, expected 0 to 1/2"
    assert kind == "sigmoid" or label_smoothing == 0, "label_smoothing belongs to the kind 'sigmoid'"
    chosen_P = _log_ratio(policy_chosen_P, reference_chosen_P)
    rejected_P = _log_ratio(policy_rejected_P, reference_rejected_P)
    assert chosen_P.shape == rejected_P.shape, f"{len(chosen_P)} chosen completions for {len(rejected_P)} rejected ones"
    if is_length_normalised:
        assert chosen_tokens_P is not None, "is_length_normalised needs the numbers of tokens"
        assert rejected_tokens_P is not None, "is_length_normalised needs the numbers of tokens"
        chosen_P, rejected_P = chosen_P / chosen_tokens_P, rejected_P / rejected_tokens_P
    delta_P = chosen_P - rejected_P
    if kind == "ipo":
        losses_P = (delta_P - 1 / (2 * beta)).square()
    else:
        losses_P = -logsigmoid(beta * delta_P)
        # Not 0 x: it would turn an infinite delta into NaN where nothing is smoothed.
        if label_smoothing > 0:
            losses_P = (1 - label_smoothing) * losses_P - label_smoothing * logsigmoid(-beta * delta_P)
    if nll_weight > 0:
        assert chosen_tokens_P is not None, "nll_weight needs the numbers of tokens"
        losses_P = losses_P - nll_weight * policy_chosen_P / chosen_tokens_P
    return PreferenceOutput(
        losses_P=losses_P,
        chosen_rewards_P=beta * chosen_P.detach(),
        rejected_rewards_P=beta * rejected_P.detach(),
    )


def completion_logprobs(logprobs_N: Tensor, num_completion_tokens: Sequence[int]) -> Tensor:
    """Add up the log-probs of each completion: [C] float64, differentiable.

    In float64, since a log-ratio is a small difference of sums of hundreds of nats.

    Args:
        num_completion_tokens: of each completion, in order; they add up to N.
    """
    assert sum(num_completion_tokens) == len(logprobs_N), (
        f"{sum(num_completion_tokens)} tokens in completions, {len(logprobs_N)} log-probs"
    )
    completion_N = torch.repeat_interleave(
        torch.arange(len(num_completion_tokens)), torch.tensor(num_completion_tokens, dtype=torch.int64)
    )
    sums_C = torch.zeros(len(num_completion_tokens), dtype=torch.float64, device=logprobs_N.device)
    return sums_C.index_add(0, completion_N.to(logprobs_N.device), logprobs_N.double())


def _log_ratio(policy_P: Tensor, reference_P: Tensor) -> Tensor:
    """In float32, or float64 if either is."""
    assert policy_P.shape == reference_P.shape, (
        f"log-probs of shape {tuple(policy_P.shape)} and of the reference {tuple(reference_P.shape)}"
    )
    dtype = torch.promote_types(torch.promote_types(policy_P.dtype, reference_P.dtype), torch.float32)
    return policy_P.to(dtype) - reference_P.detach().to(dtype)
