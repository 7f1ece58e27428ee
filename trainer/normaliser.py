"""What the summed token loss of an optimiser step is divided by, as a weight for each token.

Counted over all ranks and accumulation before anything is computed, so that any split into micro-batches gives the same
sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Normaliser = Literal["tokens", "sequence", "constant"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTotals:
    """What one optimiser step trains on. Count locally, add over ranks and accumulation, then make the weights."""

    tokens: int
    """Loss tokens."""
    completions: int
    """Completions with at least one loss token."""


def loss_totals(num_completion_tokens: Sequence[int], *, masked: Sequence[bool] | None = None) -> LossTotals:
    """Count what is trained on; a masked completion is in neither number."""
    kept = _kept_lengths(num_completion_tokens, masked)
    return LossTotals(tokens=sum(kept), completions=sum(length > 0 for length in kept))


def token_weights(
    num_completion_tokens: Sequence[int],
    normaliser: Normaliser,
    *,
    totals: LossTotals,
    constant: float | None = None,
    masked: Sequence[bool] | None = None,
) -> list[NDArray[np.float32]]:
    """Give each token of each completion its weight in the loss of the optimiser step.

    - "tokens": 1 / totals.tokens. Every token counts alike (DAPO, arXiv:2503.14476, eq. 8).
    - "sequence": 1 / (totals.completions x length). Every completion counts alike, so that tokens of long ones count
      less (GRPO, arXiv:2402.03300, eq. 3).
    - "constant": 1 / constant, independent of all lengths (Dr. GRPO, arXiv:2503.20783: number of completions of the
      step x `max_completion_tokens`).

    The weights of a whole step add up to 1 for the first two. Masked completions weigh 0 and are in no denominator; if
    all are masked, all weigh 0.

    Args:
        num_completion_tokens: of these completions, of this rank and any number of micro-batches.
        totals: of the whole optimiser step, over all ranks and accumulation.
        constant: for "constant" only.
        masked: true for a completion that must not be trained on (failed score, truncated, ...).
    """
    assert (normaliser == "constant") == (constant is not None), "`constant` belongs to the normaliser 'constant'"
    kept = _kept_lengths(num_completion_tokens, masked)
    weights: list[NDArray[np.float32]] = []
    for length, kept_length in zip(num_completion_tokens, kept, strict=True):
        if kept_length == 0:
            weight = 0.0
        elif normaliser == "tokens":
            weight = 1 / totals.tokens
        elif normaliser == "sequence":
            weight = 1 / (totals.completions * length)
        else:
            assert constant is not None
            weight = 1 / constant
        weights.append(np.full(length, weight, dtype=np.float32))
    return weights


def _kept_lengths(lengths: Sequence[int], masked: Sequence[bool] | None) -> list[int]:
    if masked is None:
        return list(lengths)
    return [0 if is_masked else length for length, is_masked in zip(lengths, masked, strict=True)]
