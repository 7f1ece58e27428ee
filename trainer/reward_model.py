"""Training a reward model on pairs, from top to bottom: an optimiser step.

    pairs = those of the step
    loss  = mean over the pairs of the whole step of -log sigmoid(score(chosen) - score(rejected) - margin)
            + centring (score(chosen) + score(rejected))^2
    one optimiser step at the learning rate of the step's number

A score is read at the last token of a completion. P = pairs of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.optimiser_step import step_optimiser
from towline.trainer.pair_step import num_completion_tokens, plan_pair_step
from towline.trainer.rank_sums import rank_sums
from towline.trainer.reward_losses import pair_reward_loss
from towline.trainer.sequence_head import RewardModel
from towline.trainer.supervised import Metrics
from towline.trainer.supervised_config import RewardModelConfig
from towline.trainer.token_examples import TokenPair


@dataclass(frozen=True, slots=True, kw_only=True)
class PairReward:
    engine: DeepSpeedEngine[RewardModel]
    config: RewardModelConfig
    pairs: Sequence[TokenPair]
    rows: Callable[[int], Sequence[int]]
    """Step → which pairs it trains on."""
    total_steps: int
    on_progress: Callable[[str], None]

    def take_step(self, step: int) -> Metrics:
        """
        Raises:
            NumericsError: loss or gradient are not finite.
        """
        config, engine = self.config, self.engine
        pairs = [self.pairs[row] for row in self.rows(step)]
        planned = plan_pair_step(pairs, config, engine.policy)
        sums: dict[str, float] = {}
        for number, (batch, members) in enumerate(planned.batches()):
            self.on_progress("train")
            scores_P2 = engine.scores(batch, batch.last_index).view(-1, 2)
            margins_P = torch.tensor([pairs[index].margin or 0.0 for index in members], device=scores_P2.device)
            losses_P = pair_reward_loss(
                scores_P2[:, 0], scores_P2[:, 1], margins_P=margins_P.to(scores_P2.dtype), centring=config.centring
            )
            engine.backward(losses_P.sum() / len(pairs), is_last=number == planned.num_micro_batches - 1)
            for name, value in _measured(losses_P, scores_P2).items():
                sums[name] = sums.get(name, 0.0) + value
        means = {name: total / len(pairs) for name, total in rank_sums(sums).items()}
        ended = step_optimiser(engine, config, step, total_steps=self.total_steps, loss=means["loss/preference"])
        num_tokens = sum(sum(num_completion_tokens(pair)) for pair in pairs)
        return planned.metrics() | means | ended | {"tokens/loss": num_tokens}


def _measured(losses_P: Tensor, scores_P2: Tensor) -> dict[str, float]:
    """Sums over the pairs of a micro-batch."""
    chosen_P, rejected_P = scores_P2.detach().unbind(1)
    measured = {
        "loss/preference": losses_P.detach(),
        "preference/chosen_reward": chosen_P,
        "preference/rejected_reward": rejected_P,
        "preference/margin": chosen_P - rejected_P,
        "preference/accuracy": (chosen_P > rejected_P).double() + 0.5 * (chosen_P == rejected_P).double(),
    }
    return {name: values.sum(dtype=torch.float64).item() for name, values in measured.items()}
