"""Exact rational arithmetic on an expression: every part that is a rational number becomes one.

Powers, factorials and binomials are worked out only after a bound on their size has been checked.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction

from towline.rollout.rewards.mathematics.expression import (
    INFINITY,
    MINUS_INFINITY,
    Apply,
    Expression,
    Name,
    Number,
    Undefined,
    negative,
)  # fmt: skip
from towline.rollout.rewards.mathematics.work import Work

MAX_BITS = 40_000
"""Of a numerator or a denominator: about 12,000 digits. What would be longer stays as it is written."""
MAX_ROOT = 64
MAX_LOG_DENOMINATOR = 12


def fold(expression: Expression, work: Work, values: Mapping[str, Fraction] | None = None) -> Expression:
    """Work out what is rational.

    Args:
        values: of variables, by name.

    Raises:
        Undefined: a division by zero.
        TooCostly: the budget is spent.
    """
    if isinstance(expression, Number):
        return expression
    if isinstance(expression, Name):
        return Number(values[expression.name]) if values and expression.name in values else expression
    work.spend(1)
    arguments = tuple(fold(argument, work, values) for argument in expression.arguments)
    if expression.operation in ("+", "*"):
        return _fold_many(expression.operation, arguments, work)
    if any(isinstance(argument, Name) and argument.name in ("oo", "-oo") for argument in arguments):
        return _with_infinity(expression.operation, arguments)
    rule = _RULES.get(expression.operation)
    if rule is not None and all(isinstance(argument, Number) for argument in arguments):
        numbers = [argument.value for argument in arguments if isinstance(argument, Number)]
        work.spend(sum(map(_bits, numbers)) / 64)
        value = rule(*numbers)
        if value is not None:
            work.spend((_bits(value) / 64) ** 1.5 / 50)
            return Number(value)
    return Apply(expression.operation, arguments)


def _with_infinity(operation: str, arguments: tuple[Expression, ...]) -> Expression:
    if operation == "-" and len(arguments) == 1:
        return negative(arguments[0])
    raise Undefined("infinity within an expression")


def _fold_many(operation: str, arguments: tuple[Expression, ...], work: Work) -> Expression:
    """Sum or product; its rational members come first, as one."""
    total = Fraction(0 if operation == "+" else 1)
    rest: list[Expression] = []
    for argument in arguments:
        if argument in (INFINITY, MINUS_INFINITY):
            raise Undefined("infinity within an expression")
        if not isinstance(argument, Number):
            rest.append(argument)
            continue
        bits = _bits(total) + _bits(argument.value)
        work.spend(1 + (bits / 64) ** 1.5 / 20)
        if bits > 2 * MAX_BITS:
            rest.append(argument)
        elif operation == "+":
            total += argument.value
        else:
            total *= argument.value
    if operation == "*" and total == 0 and not rest:
        return Number(total)
    if not rest:
        return Number(total)
    if total == (0 if operation == "+" else 1):
        return rest[0] if len(rest) == 1 else Apply(operation, tuple(rest))
    return Apply(operation, (Number(total), *rest))


def _bits(value: Fraction) -> int:
    return value.numerator.bit_length() + value.denominator.bit_length()


def _divide(top: Fraction, bottom: Fraction) -> Fraction:
    if bottom == 0:
        raise Undefined("a division by zero")
    return top / bottom


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if base == 0:
        if exponent <= 0:
            raise Undefined("zero to a power that is not positive")
        return Fraction(0)
    if abs(base) == 1 and exponent.denominator == 1:
        return base if exponent.numerator % 2 else Fraction(1)
    if exponent.denominator > 1:
        if exponent.denominator > MAX_ROOT or abs(exponent.numerator) * _bits(base) > MAX_BITS * exponent.denominator:
            return None
        root = _root(base, Fraction(exponent.denominator))
        return None if root is None else _power(root, Fraction(exponent.numerator))
    return base**exponent.numerator if abs(exponent.numerator) * _bits(base) <= MAX_BITS else None


def _root(radicand: Fraction, degree: Fraction) -> Fraction | None:
    """The exact root if it is rational; the real one of a negative number when the degree is odd."""
    if degree == 0:
        raise Undefined("a root of degree zero")
    if degree.denominator != 1 or not 1 <= degree <= MAX_ROOT:
        return None
    if radicand < 0:
        positive = _root(-radicand, degree) if degree.numerator % 2 else None
        return None if positive is None else -positive
    top = _integer_root(radicand.numerator, degree.numerator)
    bottom = _integer_root(radicand.denominator, degree.numerator)
    return None if top is None or bottom is None else Fraction(top, bottom)


def _integer_root(value: int, degree: int) -> int | None:
    """By Newton's method from above, which never leaves the integers."""
    if degree == 2:
        root = math.isqrt(value)
    elif value < 2:
        root = value
    else:
        root = 1 << -(-value.bit_length() // degree)
        while (step := ((degree - 1) * root + value // root ** (degree - 1)) // degree) < root:
            root = step
    return root if root**degree == value else None


def _factorial(value: Fraction) -> Fraction | None:
    if value.denominator != 1 or value < 0:
        return None if value.denominator != 1 else _undefined("the factorial of a negative number")
    size = value.numerator
    return Fraction(math.factorial(size)) if size * max(1, size.bit_length()) <= MAX_BITS * 2 else None


def _undefined(what: str) -> Fraction:
    raise Undefined(what)


def _binomial(upper: Fraction, lower: Fraction) -> Fraction | None:
    if upper.denominator != 1 or lower.denominator != 1 or upper < 0:
        return None
    if not 0 <= lower <= upper:
        return Fraction(0)
    chosen = min(lower.numerator, upper.numerator - lower.numerator)
    return Fraction(math.comb(upper.numerator, chosen)) if chosen * upper.numerator.bit_length() <= MAX_BITS else None


def _logarithm(base: Fraction, value: Fraction) -> Fraction | None:
    """The exact logarithm if it is a fraction with a small denominator."""
    if value <= 0 or base <= 0 or base == 1 or _bits(value) + _bits(base) > MAX_BITS:
        return None
    if value == 1:
        return Fraction(0)
    size = _log2(base)
    if size == 0:
        return None
    guess = Fraction(_log2(value) / size).limit_denominator(MAX_LOG_DENOMINATOR)
    if abs(guess.numerator) * _bits(base) > MAX_BITS or guess.denominator * _bits(value) > MAX_BITS:
        return None
    return guess if value**guess.denominator == base**guess.numerator else None


def _log2(value: Fraction) -> float:
    return math.log2(value.numerator) - math.log2(value.denominator)


def _of_integers(function: Callable[..., int]) -> Callable[..., Fraction | None]:
    def exact(*values: Fraction) -> Fraction | None:
        if any(value.denominator != 1 for value in values):
            return None
        return Fraction(function(*(value.numerator for value in values)))

    return exact


_RULES: dict[str, Callable[..., Fraction | None]] = {
    "-": lambda value: -value,
    "/": _divide,
    "^": _power,
    "root": _root,
    "!": _factorial,
    "binom": _binomial,
    "log": _logarithm,
    "abs": lambda value: abs(value),
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "max": lambda *values: max(values),
    "min": lambda *values: min(values),
    "gcd": _of_integers(math.gcd),
    "lcm": _of_integers(math.lcm),
}
