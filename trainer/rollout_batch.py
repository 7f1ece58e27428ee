"""From scored rollouts to training sequences: advantages on read, and what is left out and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from towline.storage.records import FinishReason, RolloutGroup, Score
from towline.trainer.advantages import Baseline, Scale, step_advantages
from towline.trainer.packing import TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    group: RolloutGroup
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    tokens: TokenSequence
    rollout_logprobs: NDArray[np.float32]
    """[completion tokens] at generation."""
    versions: NDArray[np.uint32]
    advantage: float
    group: int
    member: int
    """Which completion of its group."""


def training_sequences(
    groups: Sequence[ScoredGroup],
    *,
    baseline: Baseline,
    scale: Scale,
    masks_truncated: bool = False,
    penalties: Mapping[tuple[int, int], float] | None = None,
) -> list[TrainingSequence]:
    """Completions to train on, in canonical order.

    A completion whose grading failed is left out, of its group's mean as well. A group with fewer than two scored
    completions is dropped. Equal rewards give advantage 0: those completions stay, for the KL term and the normaliser.

    Args:
        masks_truncated: completions that were cut at their longest are compared with, and not trained on.
        penalties: (group, member) → what is taken off its task reward.
    """
    taken = penalties or {}
    rewards = [
        task_rewards(scored) - np.array([taken.get((number, member), 0.0) for member in range(len(scored.scores))])
        for number, scored in enumerate(groups)
    ]
    sequences: list[TrainingSequence] = []
    for number, advantages in enumerate(step_advantages(rewards, baseline=baseline, scale=scale)):
        if advantages is None:
            continue
        group = groups[number].group
        for member, (completion, advantage) in enumerate(zip(group.completions, advantages, strict=True)):
            is_cut = masks_truncated and completion.finish_reason is FinishReason.LENGTH
            if np.isnan(rewards[number][member]) or is_cut:
                continue
            sequences.append(
                TrainingSequence(
                    tokens=TokenSequence(
                        token_ids=np.concatenate([group.prompt_token_ids, completion.token_ids]),
                        num_prompt_tokens=len(group.prompt_token_ids),
                    ),
                    rollout_logprobs=completion.logprobs,
                    versions=completion.versions,
                    advantage=float(advantage),
                    group=number,
                    member=member,
                )
            )
    return sequences


def task_rewards(scored: ScoredGroup) -> NDArray[np.float64]:
    """[completions], NaN for what must not be compared with: a failed score, or one that was taken back half-way."""
    is_aborted = [completion.finish_reason is FinishReason.ABORTED for completion in scored.group.completions]
    return np.where(is_aborted, np.nan, [score.total for score in scored.scores])


def why_nothing_compares(groups: Sequence[ScoredGroup], step: int) -> str:
    """Of groups none of which has two scored completions."""
    completions = [completion for scored in groups for completion in scored.group.completions]
    scores = [score for scored in groups for score in scored.scores]
    failed = [score for score in scores if np.isnan(score.total)]
    num_aborted = sum(completion.finish_reason is FinishReason.ABORTED for completion in completions)
    example = next((score.detail for score in failed if score.detail), "none was recorded")
    return (
        f"step {step}: no prompt has two scored completions to compare: of {len(scores)} completions {len(failed)} "
        f"could not be scored and {num_aborted} were taken back. First reason: {example}. Mend the reward or its "
        f"time-out; the completions are in the ledger: towline samples --step {step}."
    )


def is_useful(scored: ScoredGroup) -> bool:
    """Whether at least two of its task rewards differ: else there is nothing to learn from comparing them."""
    rewards = task_rewards(scored)
    return len(set(rewards[~np.isnan(rewards)].tolist())) > 1


def reward_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """What the step's rewards and lengths look like. Failed scores are counted, and left out of every mean."""
    totals = np.array([score.total for scored in groups for score in scored.scores])
    scored_totals = totals[~np.isnan(totals)]
    completions = [completion for scored in groups for completion in scored.group.completions]
    lengths = np.array([len(completion.token_ids) for completion in completions])
    parts = {
        name: [score.parts[name] for scored in groups for score in scored.scores] for name in groups[0].scores[0].parts
    }
    return {
        "reward/mean": _mean(scored_totals),
        "reward/std": _std(scored_totals),
        "reward/failed": float(np.isnan(totals).mean()),
        "reward/useful_groups": float(np.mean([is_useful(scored) for scored in groups])),
        **{f"reward/part/{name}": _mean(np.array(values)[~np.isnan(values)]) for name, values in parts.items()},
        **{f"reward/spread/{name}": _std(np.array(values)[~np.isnan(values)]) for name, values in parts.items()},
        "completion/length": float(lengths.mean()),
        "completion/length_max": float(lengths.max()),
        "completion/truncated": float(np.mean([c.finish_reason is FinishReason.LENGTH for c in completions])),
    }


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")


def _std(values: NDArray[np.float64]) -> float:
    return float(values.std()) if len(values) else float("nan")
