"""Direct preference optimisation, from top to bottom: an optimiser step on pairs.

    pairs = those of the step
    delta = (log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))
    loss  = mean over the pairs of the whole step of -log sigmoid(beta delta), or another of `preference_losses`
    one optimiser step at the learning rate of the step's number

The reference's log-probs are a table, computed before. P = pairs of a micro-batch, N = its completion tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.fused_loss import differentiated
from towline.trainer.optimiser_step import step_optimiser
from towline.trainer.pair_step import num_completion_tokens, of_pairs, plan_pair_step
from towline.trainer.policy import Policy
from towline.trainer.preference_losses import PreferenceOutput, completion_logprobs, preference_loss
from towline.trainer.rank_sums import rank_sums
from towline.trainer.supervised import Metrics
from towline.trainer.supervised_config import DpoConfig
from towline.trainer.token_examples import TokenPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo:
    engine: DeepSpeedEngine[Policy]
    config: DpoConfig
    pairs: Sequence[TokenPair]
    reference: NDArray[np.float64]
    """[pairs, 2], of chosen and rejected, sums over the completion, nats."""
    rows: Callable[[int], Sequence[int]]
    """Step → which pairs it trains on."""
    total_steps: int
    on_progress: Callable[[str], None]

    def take_step(self, step: int) -> Metrics:
        """
        Raises:
            NumericsError: loss or gradient are not finite.
        """
        config, engine, rows = self.config, self.engine, self.rows(step)
        pairs, reference = [self.pairs[row] for row in rows], self.reference[list(rows)]
        planned = plan_pair_step(pairs, config, engine.policy)
        sums: dict[str, float] = {name: 0.0 for name in _MEASURES}

        def pair_loss(members: Sequence[int], logprobs_N: Tensor) -> Tensor:
            """Their share of the step's loss, from the log-probs of both completions of each pair."""
            output, policy_P2 = self._compare([pairs[index] for index in members], reference[members], logprobs_N)
            for name, value in _measured(output, policy_P2).items():
                sums[name] += value
            return output.losses_P.sum() / len(pairs)

        for number, (batch, members) in enumerate(planned.batches()):
            self.on_progress("train")
            sizes = [sum(num_completion_tokens(pairs[index])) for index in members]
            loss, _, _ = engine.forward_with_loss(
                batch, differentiated(of_pairs(pair_loss, members, sizes)), with_entropy=False, groups=sizes
            )
            engine.backward(loss, is_last=number == planned.num_micro_batches - 1)
        means = {name: total / len(pairs) for name, total in rank_sums(sums).items()}
        ended = step_optimiser(engine, config, step, total_steps=self.total_steps, loss=means["loss/preference"])
        num_tokens = sum(sum(num_completion_tokens(pair)) for pair in pairs)
        return planned.metrics() | means | ended | {"tokens/loss": num_tokens}

    def _compare(
        self, pairs: Sequence[TokenPair], reference: NDArray[np.float64], logprobs_N: Tensor
    ) -> tuple[PreferenceOutput, Tensor]:
        """With the log-probs of whole completions, [P, 2]."""
        lengths = [num_completion_tokens(pair) for pair in pairs]
        policy_P2 = completion_logprobs(logprobs_N, list(chain.from_iterable(lengths))).view(-1, 2)
        reference_P2 = torch.from_numpy(reference).to(policy_P2.device)
        is_normalised = self.config.length_normalised or self.config.loss == "ipo"
        tokens_P2 = torch.tensor(lengths, device=policy_P2.device) if is_normalised else None
        output = preference_loss(
            policy_P2[:, 0],
            policy_P2[:, 1],
            reference_P2[:, 0],
            reference_P2[:, 1],
            beta=self.config.beta,
            kind=self.config.loss,
            is_length_normalised=is_normalised,
            label_smoothing=self.config.label_smoothing,
            chosen_tokens_P=None if tokens_P2 is None else tokens_P2[:, 0],
            rejected_tokens_P=None if tokens_P2 is None else tokens_P2[:, 1],
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
