"""How good a reward model is on pairs that it was not trained on. Numpy only; a NaN score makes its metrics NaN.

P = pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_BINS = 10
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)

_HALF = 0.5
"""The least confidence that a choice between two can have."""


def pair_accuracy(chosen_P: ArrayLike, rejected_P: ArrayLike) -> float:
    """Share of pairs whose chosen completion has the higher score; a tie counts a half. NaN for no pairs."""
    hits_P = hits(_margins(chosen_P, rejected_P))
    return float(hits_P.mean()) if len(hits_P) else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliabilityBin:
    """Pairs whose confidence is in (low, high]; the first bin takes a half too."""

    low: float
    high: float
    num_pairs: int
    confidence: float
    """On average; NaN where there are no pairs."""
    accuracy: float
    """`pair_accuracy` of these; NaN where there are no pairs."""


def reliability(chosen_P: ArrayLike, rejected_P: ArrayLike, *, num_bins: int = NUM_BINS) -> list[ReliabilityBin]:
    """Put pairs into bins of confidence, from 1/2 to 1.

    sigmoid(chosen - rejected) is the model's chance that the chosen one is better (Bradley and Terry). Its confidence
    is that chance or its complement, whichever is larger: the data is told which one was chosen, the model is not.
    """
    margins_P = _margins(chosen_P, rejected_P)
    assert not np.isnan(margins_P).any(), "a NaN margin belongs to no bin, see calibration_error"
    confidence_P, hits_P = 1 / (1 + np.exp(-np.abs(margins_P))), hits(margins_P)
    edges = np.linspace(_HALF, 1.0, num_bins + 1)
    place_P = np.clip(np.searchsorted(edges, confidence_P, side="left") - 1, 0, num_bins - 1)
    return [
        ReliabilityBin(
            low=float(edges[place]),
            high=float(edges[place + 1]),
            num_pairs=int((place_P == place).sum()),
            confidence=_mean(confidence_P[place_P == place]),
            accuracy=_mean(hits_P[place_P == place]),
        )
        for place in range(num_bins)
    ]


def calibration_error(chosen_P: ArrayLike, rejected_P: ArrayLike, *, num_bins: int = NUM_BINS) -> float:
    """|accuracy - confidence| of the bins of `reliability`, weighted by their pairs: the expected calibration error
    (Guo et al. 2017, arXiv:1706.04599, eq. 3). NaN for no pairs, or where a score is NaN."""
    margins_P = _margins(chosen_P, rejected_P)
    if len(margins_P) == 0 or np.isnan(margins_P).any():
        return float("nan")
    bins = [each for each in reliability(chosen_P, rejected_P, num_bins=num_bins) if each.num_pairs]
    return sum(each.num_pairs * abs(each.accuracy - each.confidence) for each in bins) / len(margins_P)


def score_spread(scores: ArrayLike) -> dict[str, float]:
    """Mean, standard deviation and quantiles, by name. A spread near 0 means a head that tells nothing apart.

    Call it with the chosen, the rejected and all scores. NaN for no scores.
    """
    values = np.asarray(scores, dtype=np.float64)
    names = [f"q{round(100 * quantile):02d}" for quantile in QUANTILES]
    if values.size == 0:
        return dict.fromkeys(["mean", "std", *names], float("nan"))
    quantiles: Sequence[float] = np.quantile(values, QUANTILES).tolist()
    return {"mean": float(values.mean()), "std": float(values.std())} | dict(zip(names, quantiles, strict=True))


def _margins(chosen_P: ArrayLike, rejected_P: ArrayLike) -> NDArray[np.float64]:
    chosen_P, rejected_P = np.asarray(chosen_P, dtype=np.float64), np.asarray(rejected_P, dtype=np.float64)
    assert chosen_P.shape == rejected_P.shape, f"{chosen_P.shape} chosen scores for {rejected_P.shape} rejected ones"
    return chosen_P - rejected_P


def hits(margins_P: NDArray[np.float64]) -> NDArray[np.float64]:
    """1, 1/2 or 0; NaN for NaN, since a comparison would make a miss of it."""
    return (np.sign(margins_P) + 1) / 2


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if len(values) else float("nan")
