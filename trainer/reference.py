"""The frozen reference policy. Its log-probs carry no gradient. N = completion tokens of a micro-batch."""

from pathlib import Path

import torch
from torch import Tensor

from towline.trainer.config import TrainerConfig
from towline.trainer.deepspeed_engine import shard_frozen
from towline.trainer.packing import PackedBatch
from towline.trainer.policy import load_policy


class Reference:
    """On the device beside the policy, in the policy's precision and with the policy's sharding."""

    def __init__(self, folder: Path, config: TrainerConfig, *, temperature: float) -> None:
        policy = load_policy(folder, temperature=temperature, precision=config.precision, packing=config.packing)
        self._policy = shard_frozen(policy, config)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> Tensor:
        """[N] float32, at the sampling temperature. Every rank must call it: ZeRO-3 gathers."""
        return self._policy(batch)[0]
