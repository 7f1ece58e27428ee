"""Log-probs of whole completions without gradient: of held-out examples, and of a reference."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from towline.trainer.config import EngineConfig
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.example_step import only, plan_examples
from towline.trainer.packing import TokenSequence


def completion_logprobs(
    engine: DeepSpeedEngine,
    config: EngineConfig,
    sequences: Sequence[TokenSequence],
    *,
    trained: Sequence[NDArray[np.bool_]],
    groups: Sequence[int],
    on_progress: Callable[[], None],
) -> NDArray[np.float64]:
    """
    Args:
        trained: of each sequence, which of its completion tokens count.
        groups: of each sequence; those of one group have one prompt.

    Returns:
        For each sequence the sum over its tokens that count, nats; the same on every rank. Every rank must call it.
    """
    sums = torch.zeros(len(sequences), dtype=torch.float64)
    for batch, members in plan_examples(sequences, groups, config, engine.policy).batches():
        on_progress()
        batch = only(batch, [trained[index] for index in members])
        logprobs = engine.evaluate(batch).double().cpu()
        for index, part in zip(members, logprobs.split(list(batch.num_completion_tokens)), strict=True):
            sums[index] = part.sum()
    dist.all_reduce(sums)
    return sums.numpy()
