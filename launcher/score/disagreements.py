"""Where two scorings of the same completions differ: part by part of the same name, and in the total."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from towline.launcher.score.sample import Sample

TOTAL = "total"
MAX_EXAMPLES = 3
TOLERANCE = 1e-9
"""Relative, above 1 in absolute value; else absolute. Weighted sums may be rounded in another order."""


@dataclass(slots=True)
class Compared:
    num: int = 0
    num_different: int = 0
    examples: list[tuple[Sample, float, float]] = field(default_factory=list[tuple[Sample, float, float]])
    """Sample, old and new value."""

    @property
    def share(self) -> float:
        return self.num_different / self.num if self.num else 0.0


class Disagreements:
    def __init__(self) -> None:
        self.by_name: dict[str, Compared] = {}
        """Part, or `total`, in the order of the parts → what was compared."""
        self.num_without = 0
        """Completions without an earlier score."""

    def add(self, sample: Sample) -> None:
        if sample.earlier is None:
            self.num_without += 1
            return
        old = sample.earlier.parts if sample.earlier.total is None else {
            **sample.earlier.parts, TOTAL: sample.earlier.total
        }  # fmt: skip
        new = {**sample.score.parts, TOTAL: sample.score.total}
        for name in (name for name in new if name in old):
            compared = self.by_name.setdefault(name, Compared())
            compared.num += 1
            if differs(old[name], new[name]):
                compared.num_different += 1
                if len(compared.examples) < MAX_EXAMPLES:
                    compared.examples.append((sample, old[name], new[name]))

    def lines(self) -> Iterator[str]:
        """Nothing where nothing was compared. The total's examples are shown only where no part explains them."""
        is_explained = any(one.num_different for name, one in self.by_name.items() if name != TOTAL)
        for name, one in self.by_name.items():
            yield f"  {name}   {one.num_different:,} of {one.num:,} differ ({one.share:.2%})"
            if name != TOTAL or not is_explained:
                yield from (f"    {sample.where}   {_text(old)} → {_text(new)}" for sample, old, new in one.examples)
        if self.by_name and self.num_without:
            yield f"  {self.num_without:,} completions have no earlier score"


def differs(old: float, new: float) -> bool:
    """A score that failed, NaN, is another than any number, and the same as one that failed too."""
    if math.isnan(old) or math.isnan(new):
        return math.isnan(old) != math.isnan(new)
    return not math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _text(value: float) -> str:
    return "failed" if math.isnan(value) else f"{value:.6g}"
