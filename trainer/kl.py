"""Estimators of KL between two policies from the log-probs of sampled tokens: pure functions, one value a token.

Every log-prob is natural, <= 0 and at the sampling temperature. T = tokens.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp: e^20 = 5e8 is far outside every clip, yet finite in float32 with its gradient.

Only from above. From below exp goes to 0 by itself, and a cut would take away a gradient that is right. NaN passes."""


def importance_ratio(policy_logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """exp(policy - old), with `MAX_LOG_RATIO`."""
    return torch.exp((policy_logprobs_T - old_logprobs_T).clamp(max=MAX_LOG_RATIO))


def kl_k1(sampled_logprobs_T: Tensor, other_logprobs_T: Tensor) -> Tensor:
    """sampled - other for each token: right in value, negative for some tokens.

    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html. For rewards only: in a
    loss its expected gradient under tokens of `sampled` is zero.
    """
    return sampled_logprobs_T - other_logprobs_T


def kl_k2(sampled_logprobs_T: Tensor, other_logprobs_T: Tensor) -> Tensor:
    """(sampled - other)^2 / 2 for each token: biased in value, right in gradient.

    Source: Schulman 2020, as above. Under tokens of `sampled` the expected gradient is that of KL(sampled || other).
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


def kl_k3_unbiased(sampled_logprobs_T: Tensor, other_logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
    """ratio k3 with ratio = exp(sampled - old), for tokens that `old` generated: right in value and in gradient.

    E_old[ratio k3] = E_sampled[k3] = KL(sampled || other), whatever `sampled` is; the gradient of an expectation that
    is right everywhere is right too, which that of k3 itself is not. Source: DeepSeek-V3.2 (arXiv:2512.02556, "Unbiased
    KL Estimate").
    """
    return importance_ratio(sampled_logprobs_T, old_logprobs_T) * kl_k3(sampled_logprobs_T, other_logprobs_T)
