"""How long grading takes: percentiles for each reward, and the slowest samples by name."""

import heapq
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from towline.storage.records import Score, ScoreStatus

NUM_SLOWEST = 5
SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Wall time of one reward for one completion, s."""

    num_scored: int
    p50_s: float
    p99_s: float
    max_s: float

    def __str__(self) -> str:
        times = [f"{name} {readable(value)}" for name, value in self._named()]
        return f"{', '.join(times)} ({self.num_scored:,} scored)"

    def _named(self) -> Iterable[tuple[str, float]]:
        return (("p50", self.p50_s), ("p99", self.p99_s), ("max", self.max_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    part: str
    seconds: float
    status: ScoreStatus
    where: str
    """Such as "step 3, row 12, completion 4"."""
    completion: str
    """Its first characters."""

    def __str__(self) -> str:
        ended = "" if self.status is ScoreStatus.OK else f", {self.status.name.lower()}"
        return f"{self.part}: {readable(self.seconds)}{ended}, {self.where}: {self.completion!r}"


@dataclass(slots=True)
class ScoreTimings:
    """Of completions that were graded; an answer from a cache took no time."""

    _seconds: "dict[str, array[float]]" = field(default_factory=dict)
    _slowest: list[tuple[float, int, Slowest]] = field(default_factory=list[tuple[float, int, Slowest]])
    _count: int = 0

    def add(self, score: Score, where: str, completion: str) -> None:
        for part, seconds in score.part_seconds.items():
            if math.isnan(seconds):  # nobody knows
                continue
            self._seconds.setdefault(part, array("f")).append(seconds)
            self._count += 1
            if len(self._slowest) == NUM_SLOWEST and seconds <= self._slowest[0][0]:
                continue
            slow = Slowest(
                part=part,
                seconds=seconds,
                status=score.part_status[part],
                where=where,
                completion=completion[:SHOWN_CHARS],
            )
            keep = heapq.heappush if len(self._slowest) < NUM_SLOWEST else heapq.heapreplace
            keep(self._slowest, (seconds, -self._count, slow))

    def latencies(self) -> dict[str, Latency]:
        """By reward; only of those that were asked."""
        return {part: latency(seconds) for part, seconds in self._seconds.items()}

    @property
    def slowest(self) -> list[Slowest]:
        """The slowest first."""
        return [slow for _, _, slow in sorted(self._slowest, reverse=True, key=lambda entry: entry[:2])]

    def lines(self) -> list[str]:
        """For people."""
        return [
            *(f"{part}: {latency}" for part, latency in self.latencies().items()),
            *(f"slowest {slow}" for slow in self.slowest),
        ]


def latency(seconds: Sequence[float]) -> Latency:
    """Nearest-rank percentiles of one or more times."""
    ordered = sorted(seconds)
    p50_s, p99_s = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return Latency(num_scored=len(ordered), p50_s=p50_s, p99_s=p99_s, max_s=ordered[-1])


def readable(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms" if seconds < 0.1 else f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"
