"""How the parts of a reward join into one number."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    name: str
    weight: float
    floor: float | None = None
    """A value below it counts as it."""
    when: Mapping[str, float] = field(default_factory=dict[str, float])
    """Other part → the least value of it at which this one counts."""

    def contribution(self, values: Mapping[str, float]) -> float:
        """What the part adds to the total: weight · value, or 0 where a condition does not hold.

        Args:
            values: part → value as it was given, NaN where the part failed. Conditions look at these, whatever floors
                and conditions those parts have themselves.

        Returns:
            NaN when the part failed or one that it depends on: nobody knows what it would have been.
        """
        value = values[self.name]
        if math.isnan(value) or any(math.isnan(values[other]) for other in self.when):
            return math.nan
        if any(values[other] < least for other, least in self.when.items()):
            return 0.0
        return self.weight * (value if self.floor is None else max(value, self.floor))

    @property
    def rule(self) -> str:
        """All but the weight, for fingerprints."""
        return f"{self.name} {self.floor!r} {sorted(self.when.items())!r}"


def total(terms: Iterable[Term], values: Mapping[str, float]) -> float:
    """Sum of the contributions; NaN unless every part has a value."""
    return sum(term.contribution(values) for term in terms)
