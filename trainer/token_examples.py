"""Examples as token ids, with exact masks. Numpy only.

Masks come from where a text was cut, never from the value of a token: padding may have the id of the end token.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from towline.trainer.packing import TokenSequence

NO_LABEL = -100
"""Of a step that nobody judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenExample:
    """A conversation to be imitated."""

    row: int
    tokens: TokenSequence
    """Its prompt is all that stands before the first token that is learned; its last token is learned."""
    trained: NDArray[np.bool_]
    """Which tokens after the prompt are learned: all but those of later turns of the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPair:
    """Two completions of one prompt, whose ids are the same in both."""

    row: int
    chosen: TokenSequence
    rejected: TokenSequence
    margin: float | None
    """By how much chosen is better, in units of the reward."""

    @property
    def is_identical(self) -> bool:
        return np.array_equal(self.chosen.token_ids, self.rejected.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSteps:
    """A solution in steps, each judged at its last token."""

    row: int
    tokens: TokenSequence
    step_ends: NDArray[np.int64]
    """Index into `tokens.token_ids` of the last token of each step."""
    labels: NDArray[np.int64]
    """For each step 1 (right), 0 (wrong) or `NO_LABEL`."""
