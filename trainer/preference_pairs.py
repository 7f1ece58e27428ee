"""Which completions of a group make a pair: the best of its rewards against the worst. Numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from towline.storage.records import Completion, RolloutGroup
from towline.trainer.packing import TokenSequence
from towline.trainer.rollout_batch import ScoredGroup, task_rewards
from towline.trainer.token_examples import TokenPair


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPair:
    tokens: TokenPair
    """Its row is the number of the group."""
    reward_gap: float
    """By how much the chosen one's reward is larger, > 0."""
    rollout_logprobs: tuple[NDArray[np.float32], NDArray[np.float32]]
    """Of chosen and rejected, at generation."""
    versions: tuple[NDArray[np.uint32], NDArray[np.uint32]]


def ranked_pairs(groups: Sequence[ScoredGroup], pairs_per_prompt: int) -> list[RankedPair]:
    """In the order of the groups: of each its best with its worst completion, its second best with its second worst, …

    A completion is in one pair at most. There is no pair of equal rewards, nor of equal tokens, and none with a
    completion whose grading failed or that was taken back. Of equal rewards the first in the group counts as better,
    which says nothing: completions of a group are drawn alike.
    """
    pairs: list[RankedPair] = []
    for number, scored in enumerate(groups):
        rewards = task_rewards(scored)
        order = sorted(np.flatnonzero(~np.isnan(rewards)), key=lambda member: -rewards[member])
        for place in range(min(pairs_per_prompt, len(order) // 2)):
            best, worst = order[place], order[-1 - place]
            gap = float(rewards[best] - rewards[worst])
            pair = _pair(scored.group, number, best, worst, gap)
            if gap > 0 and not pair.tokens.is_identical:
                pairs.append(pair)
    return pairs


def _pair(group: RolloutGroup, number: int, best: int, worst: int, gap: float) -> RankedPair:
    chosen, rejected = group.completions[best], group.completions[worst]
    return RankedPair(
        tokens=TokenPair(row=number, chosen=_sequence(group, chosen), rejected=_sequence(group, rejected), margin=None),
        reward_gap=gap,
        rollout_logprobs=(chosen.logprobs, rejected.logprobs),
        versions=(chosen.versions, rejected.versions),
    )


def _sequence(group: RolloutGroup, completion: Completion) -> TokenSequence:
    return TokenSequence(
        token_ids=np.concatenate([group.prompt_token_ids, completion.token_ids]),
        num_prompt_tokens=len(group.prompt_token_ids),
    )
