"""The loss of one micro-batch as a function of its log-probs, and the pass that computes it with its gradients.

The formula is that of `losses.policy_loss`; here it meets what the micro-batch brings along. N = completion tokens of
the micro-batch, C = those of one chunk.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from towline.trainer.config import TrainerConfig
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.fixed_logprobs import FixedLogprobs
from towline.trainer.fused_loss import differentiated
from towline.trainer.losses import policy_loss
from towline.trainer.normaliser import LossTotals, token_weights
from towline.trainer.packing import PackedBatch
from towline.trainer.rollout_batch import TrainingSequence

ALL = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLoss:
    """Call it with log-probs and their place among the N tokens: once with all, or chunk after chunk."""

    config: TrainerConfig
    fixed: FixedLogprobs
    advantages_N: Tensor
    weights_N: Tensor
    """Mask and normaliser, see `normaliser.token_weights`."""
    lengths: tuple[int, ...]
    """Tokens of each completion; they add up to N."""
    sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor], init=False)
    """Those of `losses.LossOutput`, added up over the calls; empty before the first, or where N = 0."""

    def __call__(self, logprobs_C: Tensor, tokens: slice) -> Tensor:
        config, fixed = self.config, self.fixed.at(tokens)
        output = policy_loss(
            logprobs_C,
            fixed.old_N,
            self.advantages_N[tokens],
            self.weights_N[tokens],
            surrogate=config.surrogate,
            ratio_level=config.ratio,
            lengths=self.lengths if config.ratio == "sequence" else None,
            clip_low=config.clip,
            clip_high=config.clip if config.clip_high is None else config.clip_high,
            correction_T=fixed.correction_N,
            reference_logprobs_T=fixed.reference_N,
            kl_beta=config.kl_beta if config.kl_place == "loss" else 0.0,
            kl_estimator=config.kl_estimator,
        )
        for name, value in output.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        return output.loss

    def of(self, tokens: slice) -> "MicroBatchLoss":
        """The same loss of some of the N tokens: the others weigh nothing."""
        weights_N = torch.zeros_like(self.weights_N)
        weights_N[tokens] = self.weights_N[tokens]
        return replace(self, weights_N=weights_N)


def micro_batch_loss(
    batch: PackedBatch,
    members: Sequence[TrainingSequence],
    totals: LossTotals,
    fixed: FixedLogprobs,
    config: TrainerConfig,
    max_completion_tokens: int,
) -> MicroBatchLoss:
    """
    Args:
        members: the sequences of the micro-batch, in its order.
        totals: of the whole optimiser step, over all ranks and accumulation.
    """

    def on_device(values_N: np.ndarray) -> Tensor:
        return torch.from_numpy(values_N).to(fixed.old_N.device)

    constant = totals.completions * max_completion_tokens if config.normaliser == "constant" else None
    weights = token_weights(batch.num_completion_tokens, config.normaliser, totals=totals, constant=constant)
    return MicroBatchLoss(
        config=config,
        fixed=fixed,
        advantages_N=on_device(batch.spread([sequence.advantage for sequence in members])),
        weights_N=on_device(batch.gather(weights)),
        lengths=batch.num_completion_tokens,
    )


def forward_with_loss(
    engine: DeepSpeedEngine, batch: PackedBatch, loss: MicroBatchLoss
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward pass; every rank must call it.

    A token's loss with a ratio of its own needs no other token, so its gradient is taken while the logits are at hand,
    which are then computed once instead of twice. A ratio of the whole completion needs all of its log-probs first.

    Returns:
        The loss, for `engine.backward` once; detached log-probs and entropies (nats), both [N].
    """
    if loss.config.ratio == "token":
        return engine.forward_with_loss(batch, differentiated(loss))
    logprobs_N, entropy_N = engine.forward(batch, with_entropy=True)
    return loss(logprobs_N, ALL), logprobs_N.detach(), entropy_N
