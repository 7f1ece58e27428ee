"""Log-probs that stay as they are during a step's inner steps: the engine's, the old policy's, the reference's.

Computed once, before the first inner step moves the weights. N = completion tokens of a micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from towline.storage.errors import NumericsError
from towline.trainer.config import TrainerConfig
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.inner_step import InnerStep
from towline.trainer.kl import kl_k1
from towline.trainer.losses import engine_correction
from towline.trainer.packing import PackedBatch
from towline.trainer.reference import Reference

Batches = Sequence[Sequence[tuple[PackedBatch, list[int]]]]
"""Of this rank, by inner step: each micro-batch with the indices of its sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLogprobs:
    """Of one micro-batch; none carries a gradient."""

    rollout_N: Tensor
    """The engine's, at generation."""
    old_N: Tensor
    """What the probability ratio is taken against."""
    correction_N: Tensor | None = None
    """Factor of each token for having been sampled by the engine and not by the old policy; None: 1."""
    reference_N: Tensor | None = None

    def at(self, tokens: slice) -> "FixedLogprobs":
        """Those of some of the N tokens."""
        return FixedLogprobs(
            rollout_N=self.rollout_N[tokens],
            old_N=self.old_N[tokens],
            correction_N=None if self.correction_N is None else self.correction_N[tokens],
            reference_N=None if self.reference_N is None else self.reference_N[tokens],
        )


def fixed_logprobs(
    engine: DeepSpeedEngine,
    reference: Reference | None,
    config: TrainerConfig,
    inner_steps: Sequence[InnerStep],
    batches: Batches,
    on_progress: Callable[[str], None],
) -> list[list[FixedLogprobs]]:
    """By inner step and micro-batch. Every rank must call it: ZeRO-3 gathers."""
    references: Iterator[Tensor | None] = repeat(None)
    if reference is not None:
        # All at once, since an offloaded reference has to be fetched.
        references = iter(reference.logprobs(_told(batches, on_progress)))
    fixed: list[list[FixedLogprobs]] = []
    for inner, of_step in zip(inner_steps, batches, strict=True):
        fixed.append([])
        for batch, indices in of_step:
            on_progress("train")
            fixed[-1].append(_of_batch(engine, next(references), config, inner, batch, indices))
    return fixed


def _told(batches: Batches, on_progress: Callable[[str], None]) -> Iterator[PackedBatch]:
    for batch, _ in chain.from_iterable(batches):
        on_progress("reference")
        yield batch


def _of_batch(
    engine: DeepSpeedEngine,
    reference_N: Tensor | None,
    config: TrainerConfig,
    inner: InnerStep,
    batch: PackedBatch,
    indices: Sequence[int],
) -> FixedLogprobs:
    gathered = batch.gather([inner.sequences[index].rollout_logprobs for index in indices])
    rollout_N = torch.from_numpy(gathered).to(engine.device)
    old_N = engine.evaluate(batch) if config.old == "recomputed" else rollout_N
    correction_N = None
    if config.correction != "none":
        low = config.correction_low if config.correction == "masked" else None
        correction_N = engine_correction(old_N, rollout_N, low=low, high=config.correction_high)
    return FixedLogprobs(
        rollout_N=rollout_N,
        old_N=old_N,
        correction_N=correction_N,
        reference_N=reference_N,
    )


def correction_metrics(fixed: Sequence[Sequence[FixedLogprobs]], config: TrainerConfig) -> dict[str, float]:
    """How much the weights for the engine's tokens do, over the tokens of all ranks."""
    sums = torch.zeros(3, dtype=torch.float64)
    for values in (values for of_step in fixed for values in of_step):
        assert values.correction_N is not None
        weight_N = values.correction_N.double().cpu()
        is_bounded_N = weight_N == 0 if config.correction == "masked" else weight_N >= config.correction_high
        sums += torch.stack((torch.tensor(float(len(weight_N))).double(), weight_N.sum(), is_bounded_N.double().sum()))
    dist.all_reduce(sums)
    tokens, total, bounded = sums.tolist()
    return {"mismatch/weight": total / tokens, "mismatch/weight_bounded": bounded / tokens}


def kl_penalties(
    fixed: Sequence[Sequence[FixedLogprobs]], inner_steps: Sequence[InnerStep], batches: Batches, kl_beta: float
) -> dict[tuple[int, int], float]:
    """What KL(old, reference) takes off each completion's reward: beta times the sum of k1 over its tokens.

    Returns:
        By (group, member), of all ranks. Negative where the reference likes the completion better than the old policy.

    Raises:
        NumericsError: one is not finite. A reward of NaN would be taken for a grade that failed.
    """
    places = {
        (sequence.group, sequence.member): place
        for place, sequence in enumerate(sequence for inner in inner_steps for sequence in inner.sequences)
    }
    sums = torch.zeros(len(places), dtype=torch.float64)
    for inner, of_step, logprobs in zip(inner_steps, batches, fixed, strict=True):
        for (batch, indices), values in zip(of_step, logprobs, strict=True):
            assert values.reference_N is not None, "kl_place = reward needs a reference"
            k1_N = kl_k1(values.old_N, values.reference_N).double().cpu()
            ends = np.cumsum(batch.num_completion_tokens)
            for index, end, length in zip(indices, ends, batch.num_completion_tokens, strict=True):
                sequence = inner.sequences[index]
                sums[places[sequence.group, sequence.member]] = k1_N[end - length : end].sum()
    dist.all_reduce(sums)
    if broken := [key for key, place in places.items() if not sums[place].isfinite()]:
        raise NumericsError(
            f"the KL of {len(broken)} of {len(places)} completions to the reference is not finite, first that of "
            f"completion {broken[0][1]} of group {broken[0][0]} ({sums[places[broken[0]]]:g} nats); expected finite "
            "log-probs of engine, policy and reference. Look at the weights of policy.model and at the completion: "
            "towline samples"
        )
    return {key: kl_beta * sums[place].item() for key, place in places.items()}
