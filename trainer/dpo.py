"""Direct preference optimisation, from top to bottom: an optimiser step on pairs.

    pairs = those of the step
    delta = (log p(chosen) - log p_ref(chosen)) - (log p(rejected) - log p_ref(rejected))
    loss  = mean over the pairs of the whole step of -log sigmoid(beta delta), or another of `preference_losses`
    one optimiser step at the learning rate of the step's number

The reference's log-probs are a table, computed before. P = pairs of a micro-batch, N = its completion tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.optimiser_step import step_optimiser
from towline.trainer.pair_step import num_completion_tokens, plan_pair_step
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
        sums: dict[str, float] = {}
        for number, (batch, members) in enumerate(planned.batches()):
            self.on_progress("train")
            logprobs_N, _ = engine.forward(batch)
            policy_P2 = completion_logprobs(logprobs_N, batch.num_completion_tokens).view(-1, 2)
            reference_P2 = torch.from_numpy(reference[members]).to(policy_P2.device)
            output = self._compare(policy_P2, reference_P2, [pairs[index] for index in members])
            engine.backward(output.losses_P.sum() / len(pairs), is_last=number == planned.num_micro_batches - 1)
            for name, value in _measured(output, policy_P2).items():
                sums[name] = sums.get(name, 0.0) + value
        means = {name: total / len(pairs) for name, total in rank_sums(sums).items()}
        ended = step_optimiser(engine, config, step, total_steps=self.total_steps, loss=means["loss/preference"])
        num_tokens = sum(sum(num_completion_tokens(pair)) for pair in pairs)
        return planned.metrics() | means | ended | {"tokens/loss": num_tokens}

    def _compare(self, policy_P2: Tensor, reference_P2: Tensor, pairs: Sequence[TokenPair]) -> PreferenceOutput:
        tokens_P2 = torch.tensor([num_completion_tokens(pair) for pair in pairs], device=policy_P2.device).view(-1, 2)
        is_normalised = self.config.length_normalised or self.config.loss == "ipo"
        return preference_loss(
            policy_P2[:, 0],
            policy_P2[:, 1],
            reference_P2[:, 0],
            reference_P2[:, 1],
            beta=self.config.beta,
            kind=self.config.loss,
            is_length_normalised=is_normalised,
            label_smoothing=self.config.label_smoothing,
            chosen_tokens_P=tokens_P2[:, 0] if is_normalised else None,
            rejected_tokens_P=tokens_P2[:, 1] if is_normalised else None,
        )


def _measured(output: PreferenceOutput, policy_P2: Tensor) -> dict[str, float]:
    """Sums over the pairs of a micro-batch."""
    chosen_P, rejected_P = output.chosen_rewards_P, output.rejected_rewards_P
    wins_P = (chosen_P > rejected_P).double() + 0.5 * (chosen_P == rejected_P).double()
    measured = {
        "loss/preference": output.losses_P.detach(),
        "preference/chosen_reward": chosen_P,
        "preference/rejected_reward": rejected_P,
        "preference/margin": chosen_P - rejected_P,
        "preference/accuracy": wins_P,
        "preference/chosen_logprob": policy_P2[:, 0].detach(),
    }
    return {name: values.sum(dtype=torch.float64).item() for name, values in measured.items()}
