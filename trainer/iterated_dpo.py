"""Iterated DPO, from top to bottom: the inner steps on one round's scored rollouts.

    pairs     = the best completion of each group against its worst        (`preference_pairs`)
    reference = log-probs of the pairs under the policy as the round begins, or under the model the run began with
    for each inner epoch, for each minibatch of pairs:
        loss = mean over its pairs of -log sigmoid(beta delta), or another of `preference_losses`
        one optimiser step

Fresh preferences from the current policy each round: Xu et al. 2023 (arXiv:2312.16682), Yuan et al. 2024
(arXiv:2401.10020), best against worst of several completions as in the latter. The outer steps around them are
`rollout_steps.train`. P = pairs, N = completion tokens of a micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from towline.storage.errors import RewardError
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.learning_rate import learning_rate
from towline.trainer.losses import mismatch
from towline.trainer.memory import peak_gib
from towline.trainer.not_finite import of_rollouts, refuse_not_finite
from towline.trainer.packing import PackedBatch
from towline.trainer.pair_step import PairStep, plan_pair_step
from towline.trainer.policy import Policy
from towline.trainer.preference_config import IteratedDpoConfig
from towline.trainer.preference_gradient import add_preference_gradient
from towline.trainer.preference_losses import completion_logprobs
from towline.trainer.preference_pairs import RankedPair, ranked_pairs
from towline.trainer.rank_sums import rank_largest, rank_sums
from towline.trainer.reference import Reference
from towline.trainer.rollout_batch import ScoredGroup, task_rewards, why_nothing_compares
from towline.trainer.rollout_steps import Metrics

TRAINING_TEMPERATURE = 1.0
"""Of the log-probs that are compared, of policy and reference."""


def take_inner_steps(
    engine: DeepSpeedEngine[Policy],
    reference: Reference | None,
    config: IteratedDpoConfig,
    groups: Sequence[ScoredGroup],
    *,
    step: int,
    seed: int,
    sampling_temperature: float,
    on_progress: Callable[[str], None],
    is_start: bool = False,
) -> Metrics:
    """Train on one round's groups: `inner_epochs` times over `minibatches` optimiser steps.

    A round in which all rewards are equal makes no pair and changes nothing.

    Args:
        reference: of reference = "start"; at TRAINING_TEMPERATURE, as the policy is.
        is_start: for the same call as other inner steps; nothing more is checked at a start.

    Raises:
        NumericsError: loss or gradient are not finite.
        RewardError: no group has two scored completions; nothing was changed.
    """
    if all(np.count_nonzero(~np.isnan(task_rewards(scored))) < 2 for scored in groups):
        raise RewardError(why_nothing_compares(groups, step))
    pairs = ranked_pairs(groups, config.pairs_per_prompt)
    if not pairs:
        return _NOTHING_LEARNED | {"memory/trainer_gib": peak_gib()}
    reference_P2, agreement = _fixed_logprobs(
        engine, reference, config, pairs, step=step, temperature=sampling_temperature, on_progress=on_progress
    )
    before = engine.mean_square()
    minibatches = list(_minibatches(len(pairs), config.minibatches, seed=seed, step=step))
    count = step * config.inner_epochs * config.minibatches
    taken: list[Metrics] = []
    for _ in range(config.inner_epochs):
        for numbers in minibatches:
            metrics = add_preference_gradient(
                engine, config, [pairs[number].tokens for number in numbers], reference_P2[numbers], on_progress
            )
            rate = learning_rate(
                count, peak=config.learning_rate, schedule="constant", warmup_steps=config.warmup_steps
            )
            gradient_norm = engine.step(rate)
            refuse_not_finite(metrics["loss/preference"], gradient_norm, step, look=of_rollouts(step))
            taken.append(metrics | {"loss/gradient_norm": gradient_norm, "loss/learning_rate": rate})
            count += 1
    means = {name: float(np.mean([metrics[name] for metrics in taken])) for name in taken[0]}
    return agreement | means | {
        "loss/learning_rate": taken[-1]["loss/learning_rate"],
        "tokens/trained": sum(metrics["tokens/trained"] for metrics in taken[: len(minibatches)]),
        "preference/pairs": len(pairs),
        "preference/reward_gap": float(np.mean([pair.reward_gap for pair in pairs])),
        "weights/moved": rank_largest(abs(engine.mean_square() - before)),
        "staleness/max": max(step - int(versions.min()) for pair in pairs for versions in pair.versions),
        "memory/trainer_gib": peak_gib(),
    }  # fmt: skip


_NOTHING_LEARNED: Metrics = {
    "preference/pairs": 0.0,
    "tokens/trained": 0.0,
    "loss/gradient_norm": 0.0,
    "weights/moved": 0.0,
}


def _minibatches(num_pairs: int, num_minibatches: int, *, seed: int, step: int) -> Iterator[list[int]]:
    """Divide the pairs, shuffled by (seed, step), among the optimiser steps of an inner epoch.

    Fewer pairs than optimiser steps leave some out: one without pairs would move the weights by momentum alone.
    """
    numbers = np.arange(num_pairs)
    if num_minibatches > 1:
        np.random.default_rng([seed, step]).shuffle(numbers)
    for first in range(min(num_minibatches, num_pairs)):
        yield numbers[first::num_minibatches].tolist()


def _fixed_logprobs(
    engine: DeepSpeedEngine[Policy],
    reference: Reference | None,
    config: IteratedDpoConfig,
    pairs: Sequence[RankedPair],
    *,
    step: int,
    temperature: float,
    on_progress: Callable[[str], None],
) -> tuple[NDArray[np.float64], Metrics]:
    """Before a step moves the weights: the reference's sums over each completion, [P, 2], and how far engine and
    trainer are apart on what the present policy sampled. Every rank must call it."""
    planned = plan_pair_step([pair.tokens for pair in pairs], config, engine.policy)
    batches = list(planned.batches())

    def told(phase: str) -> Iterator[PackedBatch]:
        for batch, _ in batches:
            on_progress(phase)
            yield batch

    with engine.policy.at_temperature(temperature):
        sampled = [engine.evaluate(batch) for batch in told("compare")]
    if reference is not None:
        # All at once, since an offloaded reference has to be fetched.
        referred = reference.logprobs(told("reference"))
    elif temperature == TRAINING_TEMPERATURE:
        referred = sampled
    else:
        referred = [engine.evaluate(batch) for batch in told("reference")]
    return _completion_sums(planned, batches, referred), _agreement(batches, pairs, sampled, step)


def _completion_sums(
    planned: PairStep, batches: Sequence[tuple[PackedBatch, list[int]]], logprobs: Sequence[Tensor]
) -> NDArray[np.float64]:
    """[P, 2], of chosen and rejected; the same on every rank."""
    sums_P2 = torch.zeros((len(planned.pairs), 2), dtype=torch.float64)
    for (batch, members), logprobs_N in zip(batches, logprobs, strict=True):
        sums_P2[members] = completion_logprobs(logprobs_N, batch.num_completion_tokens).view(-1, 2).cpu()
    dist.all_reduce(sums_P2)
    return sums_P2.numpy()


def _agreement(
    batches: Sequence[tuple[PackedBatch, list[int]]],
    pairs: Sequence[RankedPair],
    sampled: Sequence[Tensor],
    step: int,
) -> Metrics:
    """`mismatch/*`: engine and trainer on the tokens of the present version, at the sampling temperature."""
    sums, largest = {"k3": 0.0, "tokens": 0.0}, 0.0
    for (batch, members), logprobs_N in zip(batches, sampled, strict=True):
        rollout = batch.gather([each for index in members for each in pairs[index].rollout_logprobs])
        # Tokens of an older version differ for a good reason.
        is_current = batch.gather([versions == step for index in members for versions in pairs[index].versions]) > 0
        rollout_N, is_current_N = (torch.from_numpy(each).to(logprobs_N.device) for each in (rollout, is_current))
        k3, max_abs = mismatch(logprobs_N, rollout_N, is_current_N)
        sums["k3"] += k3.item()
        sums["tokens"] += int(is_current.sum())
        largest = max(largest, max_abs.item())
    total, worst = rank_sums(sums), rank_largest(largest)
    nan = float("nan")
    return {
        "mismatch/k3": total["k3"] / total["tokens"] if total["tokens"] else nan,
        "mismatch/max_abs_logprob": worst if total["tokens"] else nan,
    }
