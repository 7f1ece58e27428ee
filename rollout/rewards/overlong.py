"""Take a little off completions that come near to the longest allowed, and more the nearer they come.

A fact about tokens, which the texts that reward functions get do not show; so it is none of them.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from towline.storage.records import Score, ScoreStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPart:
    name: str
    weight: float
    max_tokens: int
    """L_max: the longest that a completion can be."""
    cache_tokens: int
    """L_cache: over how many tokens before it the penalty grows; from 1 to `max_tokens`."""

    def penalty(self, num_tokens: int) -> float:
        """0 up to L_max - L_cache tokens, then linear down to -1 at L_max; not below.

        DAPO (Yu et al. 2025, arXiv:2503.14476), section 3.4, eq. 13. Tokens are those that were sampled, with the one
        that ends the turn.
        """
        num_free = self.max_tokens - self.cache_tokens
        return max(-1.0, min(0.0, (num_free - num_tokens) / self.cache_tokens))

    def added_to(self, score: Score, num_tokens: int) -> Score:
        """The score with this part in parts and total; the total of a score that failed stays NaN."""
        penalty = self.penalty(num_tokens)
        return replace(
            score,
            parts={**score.parts, self.name: penalty},
            part_status={**score.part_status, self.name: ScoreStatus.OK},
            part_seconds={**score.part_seconds, self.name: 0.0},
            total=score.total + self.weight * penalty,
        )

    def added_to_hash(self, code_hash: str) -> str:
        """Fingerprint of the code and the parameters of this part and of those that `code_hash` is of."""
        what = f"{code_hash} {self.name} {self.max_tokens} {self.cache_tokens}\n".encode()
        return hashlib.blake2b(what + Path(__file__).read_bytes(), digest_size=16).hexdigest()
