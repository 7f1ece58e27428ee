"""GRPO, from top to bottom: the inner steps on one outer step's scored rollouts.

    sequences  = completions with advantages (r - mean) / std of their group
    fixed      = log-probs of the reference, and of the policy itself if it is not to take the engine's
    for each inner epoch, for each minibatch of groups:
        loss = sum over tokens of -min(ratio A, clip(ratio) A) + beta KL,  divided by the minibatch's loss tokens
        one optimiser step

The outer steps around them are `rollout_steps.train`. N = completion tokens of a micro-batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist

from towline.storage.errors import RewardError
from towline.trainer.config import TrainerConfig
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.fixed_logprobs import correction_metrics, fixed_logprobs, kl_penalties
from towline.trainer.inner_step import InnerStep
from towline.trainer.learning_rate import learning_rate
from towline.trainer.losses import mismatch
from towline.trainer.micro_batch_loss import MicroBatchLoss, forward_with_loss, micro_batch_loss
from towline.trainer.normaliser import loss_totals
from towline.trainer.not_finite import of_rollouts, refuse_not_finite
from towline.trainer.packing import PackedBatch
from towline.trainer.packing_step import plan_step
from towline.trainer.policy import Policy
from towline.trainer.rank_sums import rank_largest
from towline.trainer.reference import Reference
from towline.trainer.rollout_batch import ScoredGroup, TrainingSequence, training_sequences, why_nothing_compares
from towline.trainer.rollout_steps import Metrics
from towline.trainer.self_checks import gradient_checks, kl_reward_effect, start_checks
from towline.trainer.step_meter import StepMeter


def take_inner_steps(
    engine: DeepSpeedEngine,
    reference: Reference | None,
    config: TrainerConfig,
    groups: Sequence[ScoredGroup],
    *,
    step: int,
    seed: int,
    max_completion_tokens: int,
    on_progress: Callable[[str], None],
    is_start: bool = False,
) -> Metrics:
    """Train on one step's groups: `inner_epochs` times over `minibatches` optimiser steps.

    Args:
        is_start: of an attempt: the machinery is checked first (`self_checks`).

    Raises:
        NumericsError: loss or gradient are not finite.
        RewardError: no group has two scored completions, or all were cut and are masked; nothing was changed.
    """
    sequences = _sequences(groups, config)
    if not sequences:
        raise RewardError(_why_nothing_is_left(groups, config, step))
    inner_steps = [
        _plan_inner_step(part, config, engine.policy)
        for part in _minibatches(sequences, config.minibatches, seed=seed, step=step)
    ]
    batches = [inner.batches(dist.get_rank()) for inner in inner_steps]
    fixed = fixed_logprobs(engine, reference, config, inner_steps, batches, on_progress)
    meter = StepMeter()
    before = engine.mean_square()
    extra = correction_metrics(fixed, config) if config.correction != "none" else {}
    if config.kl_place == "reward":
        penalties = kl_penalties(fixed, inner_steps, batches, config.kl_beta)
        advantages = {(one.group, one.member): one.advantage for one in _sequences(groups, config, penalties)}
        extra |= kl_reward_effect(sequences, advantages, penalties)
        inner_steps = [inner.with_advantages(advantages) for inner in inner_steps]
        extra["reward/kl_penalty"] = float(np.mean(list(penalties.values())))
    if is_start:
        on_progress("check")
        extra |= start_checks(
            engine, inner_steps[0], batches[0][0], fixed[0][0], config, max_completion_tokens, step=step
        )
    count = step * config.inner_epochs * config.minibatches
    rate = config.learning_rate
    for epoch in range(config.inner_epochs):
        for number, inner in enumerate(inner_steps):
            meter.begin()
            for position, (batch, indices) in enumerate(batches[number]):
                on_progress("train")
                members = [inner.sequences[index] for index in indices]
                token_loss = micro_batch_loss(
                    batch, members, inner.totals, fixed[number][position], config, max_completion_tokens
                )
                loss, logprobs_N, entropy_N = forward_with_loss(engine, batch, token_loss)
                engine.backward(loss, is_last=position == len(batches[number]) - 1)
                meter.add(loss, token_loss.sums, entropy_N)
                if epoch == 0 and number == 0:
                    _add_first(meter, token_loss, logprobs_N, batch, members, step)
                    if position == 0:
                        extra |= gradient_checks(token_loss, logprobs_N)
            rate = learning_rate(
                count, peak=config.learning_rate, schedule="constant", warmup_steps=config.warmup_steps
            )
            gradient_norm = engine.step(rate)
            meter.end(gradient_norm)
            refuse_not_finite(meter.last_loss, gradient_norm, step, look=of_rollouts(step))
            count += 1
    extra["weights/moved"] = rank_largest(abs(engine.mean_square() - before))
    return extra | meter.summary(
        learning_rate=rate,
        trained_tokens=sum(piece.num_tokens for inner in inner_steps for piece in inner.pieces),
        fill=float(np.mean([inner.plan.fill for inner in inner_steps])),
        padding_saved=float(np.mean([inner.plan.padding_saved for inner in inner_steps])),
        imbalance=max(inner.plan.rank_imbalance for inner in inner_steps),
        staleness=max((step - int(sequence.versions.min()) for sequence in sequences), default=0),
    )


def _add_first(
    meter: StepMeter,
    token_loss: MicroBatchLoss,
    logprobs_N: torch.Tensor,
    batch: PackedBatch,
    members: Sequence[TrainingSequence],
    step: int,
) -> None:
    # Tokens of an older version differ for a good reason; the engine is judged by those of the present one.
    is_current = batch.gather([sequence.versions == step for sequence in members]) > 0
    is_current_N = torch.from_numpy(is_current).to(logprobs_N.device)
    measured = mismatch(logprobs_N, token_loss.fixed.rollout_N, is_current_N)
    meter.add_first(token_loss.sums, *measured, int(is_current_N.sum()))


def _sequences(
    groups: Sequence[ScoredGroup], config: TrainerConfig, penalties: Mapping[tuple[int, int], float] | None = None
) -> list[TrainingSequence]:
    return training_sequences(
        groups,
        baseline=config.baseline,
        scale=config.scale,
        masks_truncated=config.masks_truncated,
        penalties=penalties,
    )


def _plan_inner_step(sequences: Sequence[TrainingSequence], config: TrainerConfig, policy: Policy) -> InnerStep:
    num_completion_tokens = [len(sequence.rollout_logprobs) for sequence in sequences]
    pieces, plan = plan_step(
        [sequence.tokens.num_prompt_tokens for sequence in sequences],
        num_completion_tokens,
        [sequence.group for sequence in sequences],
        num_ranks=dist.get_world_size(),
        max_tokens=config.max_tokens_per_microbatch,
        packing=config.packing,
        shares_prompts=policy.shares_prompts,
        work=policy.work,
    )
    return InnerStep(sequences=sequences, pieces=pieces, plan=plan, totals=loss_totals(num_completion_tokens))


def _minibatches(
    sequences: Sequence[TrainingSequence], num_minibatches: int, *, seed: int, step: int
) -> Iterator[list[TrainingSequence]]:
    """Divide the groups, shuffled by (seed, step), among the optimiser steps of an inner epoch.

    Fewer groups than optimiser steps leave some out: one without sequences would move the weights by momentum alone.
    """
    groups = sorted({sequence.group for sequence in sequences})
    if num_minibatches > 1:
        np.random.default_rng([seed, step]).shuffle(groups)
    for number in range(min(num_minibatches, len(groups))):
        members = set(groups[number::num_minibatches])
        yield [sequence for sequence in sequences if sequence.group in members]


def _why_nothing_is_left(groups: Sequence[ScoredGroup], config: TrainerConfig, step: int) -> str:
    if cut := _sequences(groups, config.model_copy(update={"masks_truncated": False})):
        return (
            f"step {step}: nothing to train on: the {len(cut)} completions that can be compared were all cut at "
            "rollout.max_completion_tokens, and trainer.masks_truncated leaves such out. Raise the first or set the "
            f"second to false; the completions are in the ledger: towline samples --step {step}."
        )
    return why_nothing_compares(groups, step)
