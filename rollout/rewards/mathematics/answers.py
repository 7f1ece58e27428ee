"""What an answer can be, once read."""

from dataclasses import dataclass, field
from fractions import Fraction

from towline.rollout.rewards.mathematics.expression import Expression
from towline.rollout.rewards.mathematics.units import Unit


@dataclass(frozen=True, slots=True)
class Value:
    """One expression, perhaps with a unit or a per cent sign after it."""

    expression: Expression
    unit: Unit | None = None
    is_percent: bool = False
    digits: Fraction | None = None
    """Of a number to another base, as in `213_5`: what its digits say to base ten."""


@dataclass(frozen=True, slots=True)
class Words:
    words: str
    """In lower case, single spaces, without an article."""
    is_prose: bool = False
    """More than an answer has words, or words that point elsewhere: `see the figure above`."""


@dataclass(frozen=True, slots=True)
class Members:
    """Several answers: a list without brackets (no order), a set (no order, no repeats), or a tuple."""

    members: "tuple[Answer, ...]"
    opening: str = ""
    """`(` or `[` or `<`; `{` for a set; empty for a list."""
    closing: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    r"""`and`, `or` or `minus` of regions, intervals and sets, or the reals when there are none."""

    connective: str
    parts: "tuple[Answer, ...]"


@dataclass(frozen=True, slots=True)
class Bounds:
    """An inequality solved for a variable: low < variable < high."""

    variable: str
    low: Expression
    high: Expression
    has_low: bool
    has_high: bool


@dataclass(frozen=True, slots=True)
class Inequality:
    """An inequality that is not solved: 0 < difference, or 0 <= difference."""

    difference: Expression
    is_strict: bool


@dataclass(frozen=True, slots=True)
class Equation:
    left: Expression
    right: Expression


@dataclass(frozen=True, slots=True)
class Assignment:
    r"""`x = 5`, `x \\in [1, 2]`, `f(x) = 2x`, `\text{area} = 5`."""

    name: str
    value: "Answer"
    equation: Equation | None = None
    """The same as an equation, when name and value are expressions."""


@dataclass(frozen=True, slots=True)
class Steps:
    """`2 + 3 = 5` after `x =`: values that the writer says are equal."""

    values: "tuple[Answer, ...]"


@dataclass(frozen=True, slots=True)
class Ratio:
    terms: tuple[Expression, ...]
    time: str | None = None
    """`10:30`, or `10:30 pm`, if it may be a time of day."""


@dataclass(frozen=True, slots=True)
class Matrix:
    rows: tuple[tuple[Expression, ...], ...]


@dataclass(frozen=True, slots=True)
class NotRead:
    reason: str
    text: str = field(default="")
    """Without spaces: two answers that cannot be read are still the same if they are written the same."""


Answer = (
    Value | Words | Members | Region | Bounds | Inequality | Equation | Assignment | Steps | Ratio | Matrix | NotRead
)
