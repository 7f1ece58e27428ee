"""Parts of the reward that count a completion's tokens: `overlong`, and `length` once the task is learnt.

A fact about tokens, which the texts that reward functions get do not show; so they are none of them.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.total import Term
from towline.storage.records import Score, ScoreStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPenalty:
    term: Term
    free_tokens: int
    """Up to so many nothing is taken off."""
    max_tokens: int
    """The longest that a completion can be; more than `free_tokens`."""
    is_deferred: bool
    """Whether the total of a sealed score is without it: the trainer adds it from the step on at which it counts."""

    @classmethod
    def of(cls, part: RewardConfig, max_completion_tokens: int) -> Self | None:
        """None if the part judges the text."""
        if part.cache_tokens is not None:
            free_tokens = max_completion_tokens - part.cache_tokens
        elif part.target_tokens is not None:
            free_tokens = part.target_tokens
        else:
            return None
        return cls(
            term=part.term, free_tokens=free_tokens, max_tokens=max_completion_tokens, is_deferred=part.is_length
        )

    def value(self, num_tokens: int) -> float:
        """0 up to `free_tokens`, then linear down to -1 at `max_tokens`; not below.

        DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.4, eq. 13, where the length in between is L_cache. Tokens are
        those that were sampled, with the one that ends the turn.
        """
        return max(-1.0, min(0.0, (self.free_tokens - num_tokens) / (self.max_tokens - self.free_tokens)))

    def added_to(self, score: Score, num_tokens: int) -> Score:
        """The score with this part, and its contribution unless deferred; the total of one that failed stays NaN."""
        name = self.term.name
        parts = {**score.parts, name: self.value(num_tokens)}
        return replace(
            score,
            parts=parts,
            part_status={**score.part_status, name: ScoreStatus.OK},
            part_seconds={**score.part_seconds, name: 0.0},
            total=score.total if self.is_deferred else score.total + self.term.contribution(parts),
        )

    def added_to_hash(self, code_hash: str) -> str:
        """Fingerprint of the code and the parameters of this part and of those that `code_hash` is of."""
        what = f"{code_hash} {self.term.rule} {self.free_tokens} {self.max_tokens} {self.is_deferred}\n".encode()
        return hashlib.blake2b(what + Path(__file__).read_bytes(), digest_size=16).hexdigest()
