"""The gradient of one optimiser step's preference loss: forward and backward of all its pairs, in micro-batches.

    delta = (log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))
    loss  = mean over the pairs of the whole step of -log sigmoid(beta delta), or another of `preference_losses`

P = pairs of a micro-batch, N = its completion tokens.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.fused_loss import differentiated
from towline.trainer.pair_step import num_completion_tokens, of_pairs, plan_pair_step
from towline.trainer.policy import Policy
from towline.trainer.preference_config import PreferenceConfig
from towline.trainer.preference_losses import PreferenceOutput, completion_logprobs, preference_loss
from towline.trainer.rank_sums import rank_sums
from towline.trainer.token_examples import TokenPair


def add_preference_gradient(
    engine: DeepSpeedEngine[Policy],
    config: PreferenceConfig,
    pairs: Sequence[TokenPair],
    reference_P2: NDArray[np.float64],
    on_progress: Callable[[str], None],
) -> dict[str, float]:
    """Leave the gradient of the pairs' mean loss in the engine. Every rank must call it, with the same pairs.

    Args:
        pairs: of the optimiser step, >= 1.
        reference_P2: log-probs of chosen and rejected under the reference, sums over the completion, nats.

    Returns:
        `loss/preference` and `preference/*`, means over the pairs, and how they were packed; the same on every rank.
    """
    planned = plan_pair_step(pairs, config, engine.policy)
    sums: dict[str, float] = {name: 0.0 for name in _MEASURES}

    def pair_loss(members: Sequence[int], logprobs_N: Tensor) -> Tensor:
        """Their share of the step's loss, from the log-probs of both completions of each pair."""
        output, policy_P2 = _compare(config, [pairs[index] for index in members], reference_P2[members], logprobs_N)
        for name, value in _measured(output, policy_P2).items():
            sums[name] += value
        return output.losses_P.sum() / len(pairs)

    for number, (batch, members) in enumerate(planned.batches()):
        on_progress("train")
        sizes = [sum(num_completion_tokens(pairs[index])) for index in members]
        loss, _, _ = engine.forward_with_loss(
            batch, differentiated(of_pairs(pair_loss, members, sizes)), with_entropy=False, groups=sizes
        )
        engine.backward(loss, is_last=number == planned.num_micro_batches - 1)
    means = {name: total / len(pairs) for name, total in rank_sums(sums).items()}
    return planned.metrics() | means | {"tokens/loss": sum(sum(num_completion_tokens(pair)) for pair in pairs)}


def _compare(
    config: PreferenceConfig, pairs: Sequence[TokenPair], reference_P2: NDArray[np.float64], logprobs_N: Tensor
) -> tuple[PreferenceOutput, Tensor]:
    """With the log-probs of whole completions, [P, 2]."""
    lengths = [num_completion_tokens(pair) for pair in pairs]
    policy_P2 = completion_logprobs(logprobs_N, list(chain.from_iterable(lengths))).view(-1, 2)
    reference = torch.from_numpy(reference_P2).to(policy_P2.device)
    is_normalised = config.length_normalised or config.loss == "ipo"
    tokens_P2 = torch.tensor(lengths, device=policy_P2.device)
    output = preference_loss(
        policy_P2[:, 0],
        policy_P2[:, 1],
        reference[:, 0],
        reference[:, 1],
        beta=config.beta,
        kind=config.loss,
        is_length_normalised=is_normalised,
        label_smoothing=config.label_smoothing,
        nll_weight=config.nll_weight,
        chosen_tokens_P=tokens_P2[:, 0],
        rejected_tokens_P=tokens_P2[:, 1],
    )
    return output, policy_P2


_MEASURES = (
    "loss/preference",
    "preference/chosen_reward",
    "preference/rejected_reward",
    "preference/margin",
    "preference/accuracy",
    "preference/chosen_logprob",
)


def _measured(output: PreferenceOutput, policy_P2: Tensor) -> dict[str, float]:
    """Sums over the pairs."""
    chosen_P, rejected_P = output.chosen_rewards_P, output.rejected_rewards_P
    wins_P = (chosen_P > rejected_P).double() + 0.5 * (chosen_P == rejected_P).double()
    values = (
        output.losses_P.detach(), chosen_P, rejected_P, chosen_P - rejected_P, wins_P, policy_P2[:, 0].detach(),
    )  # fmt: skip
    return {name: each.sum(dtype=torch.float64).item() for name, each in zip(_MEASURES, values, strict=True)}
