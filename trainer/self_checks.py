"""What a run measures of its own machinery beside training: numbers alone, `tripwires` judges them.

Those of a step cost a few operations on its log-probs; those of a start cost up to two forward passes of one
micro-batch, and at a fresh start one optimiser step. They leave the run's bits as they are. Every rank must call each:
they add up over ranks, and ZeRO-3 gathers. N = completion tokens of a micro-batch.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from towline.trainer.config import TrainerConfig
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.fixed_logprobs import FixedLogprobs
from towline.trainer.fused_loss import differentiated
from towline.trainer.inner_step import InnerStep
from towline.trainer.micro_batch_loss import ALL, MicroBatchLoss, forward_with_loss, micro_batch_loss
from towline.trainer.not_finite import of_rollouts, refuse_not_finite
from towline.trainer.packing import PackedBatch
from towline.trainer.packing_rows import lay_out
from towline.trainer.rollout_batch import TrainingSequence

PENALTY_SPREAD = 1e-9
"""Smaller differences of KL penalties may be lost beside a reward of 1."""

LossOf = Callable[[PackedBatch, Sequence[TrainingSequence], FixedLogprobs], MicroBatchLoss]
"""The loss of sequences of the first inner step, as they lie in a micro-batch."""


def gradient_checks(loss: MicroBatchLoss, logprobs_N: Tensor) -> dict[str, float]:
    """Where the loss's gradient goes besides the policy, and whether its KL term is part of it.

    Returns:
        `check/fixed_gradient`: L2 norm of the loss's gradient in all that must be constant; `check/fixed_graphs`: how
        many of these tensors could carry one on, into old policy or reference. `check/kl_effect`, with a KL in the
        loss: L2 norm of its part of d loss / d log-probs, relative to the whole; NaN where the KL is exactly 0, as at
        the first step, for then its gradient is 0 rightly.
    """
    squares, num_graphs = _gradient_in_constants(loss, logprobs_N)
    of_kl, whole, kl = _kl_part(loss, logprobs_N)
    squares, num_graphs, of_kl, whole, kl = _summed(squares, num_graphs, of_kl, whole, kl)
    found = {"check/fixed_gradient": squares**0.5, "check/fixed_graphs": num_graphs}
    if loss.config.kl_beta > 0 and loss.config.kl_place == "loss":
        found["check/kl_effect"] = _ratio(of_kl**0.5, whole**0.5) if kl != 0 else float("nan")
    return found


def _gradient_in_constants(loss: MicroBatchLoss, logprobs_N: Tensor) -> tuple[float, int]:
    fixed = {name: value for name, value in _tensors(loss.fixed).items() if value is not None}
    others = {"advantages_N": loss.advantages_N, "weights_N": loss.weights_N}
    leaves = {name: value.detach().clone().requires_grad_() for name, value in (fixed | others).items()}
    of_leaves = dataclasses.replace(
        loss,
        fixed=dataclasses.replace(loss.fixed, **{name: leaves[name] for name in fixed}),
        advantages_N=leaves["advantages_N"],
        weights_N=leaves["weights_N"],
    )
    with torch.enable_grad():
        value = of_leaves(logprobs_N.detach().requires_grad_(), ALL)
        gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    squares = sum(gradient.double().square().sum().item() for gradient in gradients if gradient is not None)
    return squares, sum(tensor.requires_grad for tensor in (fixed | others).values())


def _tensors(fixed: FixedLogprobs) -> dict[str, Tensor | None]:
    return {part.name: getattr(fixed, part.name) for part in dataclasses.fields(fixed)}


def _kl_part(loss: MicroBatchLoss, logprobs_N: Tensor) -> tuple[float, float, float]:
    """Squared L2 norms of the slopes' part that the KL makes and of all of them, and the sum of k3."""
    with_kl = dataclasses.replace(loss)
    without_kl = dataclasses.replace(loss, config=loss.config.model_copy(update={"kl_beta": 0.0}))
    # Float64: in float32 a small KL's part could be lost beside the rewards'.
    whole_N, rewards_N = (differentiated(one)(logprobs_N.double(), ALL)[1] for one in (with_kl, without_kl))
    kl = float(with_kl.sums.get("kl_k3", 0.0))
    return (whole_N - rewards_N).square().sum().item(), whole_N.square().sum().item(), kl


def kl_reward_effect(
    sequences: Sequence[TrainingSequence],
    advantages: Mapping[tuple[int, int], float],
    penalties: Mapping[tuple[int, int], float],
) -> dict[str, float]:
    """`check/kl_effect` where the KL is taken off the rewards: by how much it changed the advantages.

    Args:
        sequences: with the advantages of the task rewards alone.
        advantages, penalties: by (group, member), those in use and what made them.

    Returns:
        The L2 norm of the change relative to that of the advantages; NaN where the penalties within each group are
        equal, and thus change nothing rightly.
    """
    own = [(one.group, one.member) for one in sequences]
    spread = max(
        max(penalties[key] for key in own if key[0] == group) - min(penalties[key] for key in own if key[0] == group)
        for group in {group for group, _ in own}
    )
    if not spread > PENALTY_SPREAD:
        return {"check/kl_effect": float("nan")}
    now = np.array([advantages[key] for key in own])
    change = now - np.array([one.advantage for one in sequences])
    return {"check/kl_effect": _ratio(float(np.linalg.norm(change)), float(np.linalg.norm(now)))}


def start_checks(
    engine: DeepSpeedEngine,
    inner: InnerStep,
    micro_batch: tuple[PackedBatch, Sequence[int]],
    fixed: FixedLogprobs,
    config: TrainerConfig,
    max_completion_tokens: int,
    *,
    step: int,
) -> dict[str, float]:
    """Before the first inner step of an attempt: `split_check`, and at step 0 `still_step_check`.

    Args:
        micro_batch, fixed: the first of this rank.

    Raises:
        NumericsError: loss or gradient of the first micro-batch are not finite.
    """

    def loss_of(batch: PackedBatch, members: Sequence[TrainingSequence], fixed: FixedLogprobs) -> MicroBatchLoss:
        return micro_batch_loss(batch, members, inner.totals, fixed, config, max_completion_tokens)

    batch, indices = micro_batch
    members = [inner.sequences[index] for index in indices]
    found = split_check(engine, batch, members, fixed, loss_of)
    if step == 0:
        found |= still_step_check(engine, batch, loss_of(batch, members, fixed))
    return found


def split_check(
    engine: DeepSpeedEngine,
    batch: PackedBatch,
    members: Sequence[TrainingSequence],
    fixed: FixedLogprobs,
    loss_of: LossOf,
) -> dict[str, float]:
    """Compare sequences in their micro-batch with the same ones alone, without gradient.

    As many are computed alone as have no more tokens than the micro-batch, the last first: what leaks, leaks forward.

    Returns:
        `check/split_logprob`, the mean difference of a token's log-prob, nats; `check/split_loss`, the difference of
        the sequences' losses relative to the sum of weight x (1 + |advantage|) over their tokens. NaN if no
        micro-batch has two sequences.
    """
    together_N = engine.evaluate(batch)
    whole = loss_of(batch, members, fixed)
    ends = np.cumsum(batch.num_completion_tokens)
    distance = tokens = loss_distance = size = 0.0
    for index in _in_step(_fitting(batch, members)):
        alone = lay_out([[members[index].tokens]] if index is not None else [], is_padded=batch.num_rows is not None)
        alone_n = engine.evaluate(alone)
        if index is None:
            continue
        place = slice(int(ends[index]) - len(alone_n), int(ends[index]))
        of_one = loss_of(alone, [members[index]], fixed.at(place))
        distance += (alone_n - together_N[place]).abs().sum(dtype=torch.float64).item()
        tokens += len(alone_n)
        loss_distance += (of_one(alone_n, ALL) - whole.of(place)(together_N, ALL)).abs().item()
        size += (whole.weights_N[place] * (1 + whole.advantages_N[place].abs())).sum(dtype=torch.float64).item()
    distance, tokens, loss_distance, size = _summed(distance, tokens, loss_distance, size)
    nan = float("nan")
    return {
        "check/split_logprob": distance / tokens if tokens else nan,
        "check/split_loss": _ratio(loss_distance, size) if tokens else nan,
    }


def _fitting(batch: PackedBatch, members: Sequence[TrainingSequence]) -> list[int]:
    """Sequences that together have no more tokens than the micro-batch; none if it has but one."""
    left, chosen = len(batch.token_ids), []
    for index in reversed(range(len(members))):
        left -= len(members[index].tokens.token_ids)
        if left < 0 or len(members) == 1:
            break
        chosen.append(index)
    return chosen


def _in_step(own: Sequence[int]) -> Iterator[int | None]:
    """As many on every rank, with None where this one has no more."""
    num = torch.tensor(len(own))
    dist.all_reduce(num, dist.ReduceOp.MAX)
    yield from (own[place] if place < len(own) else None for place in range(int(num)))


def still_step_check(engine: DeepSpeedEngine, batch: PackedBatch, loss: MicroBatchLoss) -> dict[str, float]:
    """Take one optimiser step with learning rate 0 before the first one, and undo it.

    Weight decay that ignores the learning rate, dropout, and buffers that change with each pass show here. Weights or
    buffers that did change stay so, as every later step would change them too.

    Returns:
        `check/still_logprob`, the largest change of a token's log-prob, nats.

    Raises:
        NumericsError: loss or gradient are not finite, which even this learning rate would bring into the weights.
    """
    with engine.before_first_step(), _same_randomness(engine.device):
        value, before_N, _ = forward_with_loss(engine, batch, loss)
        engine.backward(value, is_last=True)
        gradient_norm = engine.step(0.0)
        (loss_of_ranks,) = _summed(value.item())
        refuse_not_finite(loss_of_ranks, gradient_norm, step=0, look=of_rollouts(0))
        with torch.no_grad():
            after_N = engine.forward(batch)[0]
    change = torch.cat(((after_N - before_N).abs(), before_N.new_zeros(1))).max().cpu()
    dist.all_reduce(change, dist.ReduceOp.MAX)
    return {"check/still_logprob": change.item()}


@contextlib.contextmanager
def _same_randomness(device: torch.device) -> Iterator[None]:
    """What dropout draws in the block is not missing after it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _summed(*values: float) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
