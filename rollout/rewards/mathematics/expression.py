"""The tree of an expression: numbers, names and operations on them.

Operations, with their arguments: `+` and `*` any number, `-` one, `/` and `^` two, `root` (radicand, index), `pm` and
`mp` (left, right), `log` (base, argument), `binom`, `!`, `abs`, `floor`, `ceil`, `degrees`, and functions by name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Number:
    value: Fraction


@dataclass(frozen=True, slots=True)
class Name:
    """A variable, or one of the constants `pi`, `e`, `i`, `oo` and `-oo`."""

    name: str


@dataclass(frozen=True, slots=True)
class Apply:
    operation: str
    arguments: "tuple[Expression, ...]"


Expression = Number | Name | Apply

CONSTANTS = frozenset({"pi", "e", "i", "oo", "-oo"})
INFINITY, MINUS_INFINITY = Name("oo"), Name("-oo")
ONE, MINUS_ONE = Number(Fraction(1)), Number(Fraction(-1))


class Undefined(Exception):
    """The expression has no value there: a division by zero, the logarithm of zero, infinity minus infinity."""


def integer(value: int) -> Number:
    return Number(Fraction(value))


def negative(of: Expression) -> Expression:
    if isinstance(of, Number):
        return Number(-of.value)
    if isinstance(of, Name) and of.name in ("oo", "-oo"):
        return MINUS_INFINITY if of.name == "oo" else INFINITY
    return Apply("-", (of,))


def difference(left: Expression, right: Expression) -> Expression:
    return Apply("+", (left, negative(right)))


def nodes(expression: Expression) -> Iterator[Expression]:
    waiting = [expression]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, Apply):
            waiting.extend(node.arguments)


def variables(expression: Expression) -> set[str]:
    return {node.name for node in nodes(expression) if isinstance(node, Name)} - CONSTANTS


def has_sign_choice(expression: Expression) -> bool:
    return any(isinstance(node, Apply) and node.operation in ("pm", "mp") for node in nodes(expression))


def choose_sign(expression: Expression, sign: int) -> Expression:
    r"""Every `\pm` in one expression has the same sign, and `\mp` the other."""
    if not isinstance(expression, Apply):
        return expression
    arguments = tuple(choose_sign(argument, sign) for argument in expression.arguments)
    if expression.operation in ("pm", "mp"):
        left, right = arguments
        is_plus = (sign > 0) == (expression.operation == "pm")
        return Apply("+", (left, right if is_plus else negative(right)))
    return Apply(expression.operation, arguments)
