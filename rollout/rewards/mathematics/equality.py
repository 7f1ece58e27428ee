"""Whether two expressions have one value.

1. Rational numbers are compared exactly.
2. Two constants whose difference is larger than the bound on its error are different.
3. They are equal when the difference is smaller than any that is not zero: proved for algebraic numbers, by their
   separation bound; by rule for others, at 200 bits and four more for each bit written in the answers.
4. Expressions with variables are compared at fixed rational points, exactly where they are rational there.
"""

import math
import random
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction

from towline.rollout.rewards.mathematics.expression import (
    INFINITY,
    MINUS_INFINITY,
    Apply,
    Expression,
    Name,
    Number,
    Undefined,
    difference,
    nodes,
    variables,
)  # fmt: skip
from towline.rollout.rewards.mathematics.folding import fold
from towline.rollout.rewards.mathematics.numerics import Ball, Imprecise, approximate, is_real, subtract
from towline.rollout.rewards.mathematics.separation import separation_bits
from towline.rollout.rewards.mathematics.work import TooCostly, Work

FIRST_BITS, GUARD_BITS = 64, 32
MAX_BITS = 20_000
RULE_BITS = 200
NUM_POINTS, MAX_POINTS, MIN_POINTS = 4, 14, 2
MAX_VARIABLES = 20

Point = dict[str, Fraction]


def same_value(left: Expression, right: Expression, work: Work) -> bool:
    """Whether both have the same value, for all values of the variables for which both have one.

    Raises:
        TooCostly: that cannot be told within the bounds.
    """
    if left == right:
        return True
    names = sorted(variables(left) | variables(right))
    if names:
        return _same_at_points(left, right, names, work)
    folded_left, folded_right = _fold_or_none(left, work), _fold_or_none(right, work)
    if folded_left is None or folded_right is None:
        if folded_left is folded_right:
            raise TooCostly("neither has a value")
        return False
    return _same_constants(folded_left, folded_right, work)


def same_up_to_factor(left: Expression, right: Expression, work: Work, *, positive: bool) -> bool:
    """Whether left = c * right for a constant c other than 0, or above 0."""
    names = sorted(variables(left) | variables(right))
    reference: tuple[Expression, Expression] | None = None
    num_agreed = 0
    for point in _points(names):
        try:
            here = fold(left, work, point), fold(right, work, point)
            zeros = [is_zero(value, work) for value in here]
            if zeros[0] != zeros[1]:
                return False
            if zeros[0]:
                continue
            if positive and _sign(here[0], work) != _sign(here[1], work):
                return False
            if reference is not None and not _same_constants(
                Apply("*", (here[0], reference[1])), Apply("*", (here[1], reference[0])), work
            ):
                return False
        except Undefined:
            continue
        reference = reference or here
        num_agreed += 1
        if num_agreed == NUM_POINTS:
            return True
    return num_agreed > MIN_POINTS


def is_zero(expression: Expression, work: Work) -> bool:
    return _same_constants(fold(expression, work), Number(Fraction(0)), work)


def order(left: Expression, right: Expression, work: Work) -> int:
    """-1, 0 or 1 as left is below, at or above right, which are real constants or infinities."""
    infinities: dict[Expression, int] = {MINUS_INFINITY: -1, INFINITY: 1}
    if left in infinities or right in infinities:
        ranks = infinities.get(left, 0), infinities.get(right, 0)
        return (ranks[0] > ranks[1]) - (ranks[0] < ranks[1])
    if same_value(left, right, work):
        return 0
    return _sign(fold(difference(left, right), work), work)


def has_value(expression: Expression, work: Work) -> bool:
    """Whether an expression can be evaluated at all within the bounds, at some point."""
    for point in _points(sorted(variables(expression))):
        try:
            folded = fold(expression, work, point)
            if folded not in (INFINITY, MINUS_INFINITY) and not isinstance(folded, Number):
                approximate(folded, 2 * FIRST_BITS, work)
        except Undefined:
            continue
        except TooCostly:
            return False
        except Imprecise:
            return True
        return True
    return False


def _sign(constant: Expression, work: Work) -> int:
    """Of a real constant that is not zero."""
    if isinstance(constant, Number):
        return (constant.value > 0) - (constant.value < 0)
    ball = _resolved(constant, work)
    if not is_real(ball):
        raise TooCostly("complex numbers have no order")
    return 1 if ball.value.real > 0 else -1


def _resolved(constant: Expression, work: Work) -> Ball:
    """The value of a constant that is not zero, precisely enough to see that."""
    bits = FIRST_BITS
    while bits <= MAX_BITS:
        with suppress(Imprecise):
            ball = approximate(constant, bits, work)
            if ball.is_nonzero:
                return ball
        bits *= 2
    raise TooCostly("a value that could not be told from zero")


def _fold_or_none(expression: Expression, work: Work) -> Expression | None:
    try:
        return fold(expression, work)
    except Undefined:
        return None


def _same_constants(left: Expression, right: Expression, work: Work) -> bool:
    if left == right:
        return True
    if isinstance(left, Number) and isinstance(right, Number):
        return False
    if not {left, right}.isdisjoint((INFINITY, MINUS_INFINITY)):
        return False
    bits = FIRST_BITS
    while True:
        balls = _balls(left, right, bits, work)
        if isinstance(balls, bool):
            return balls
        wanted_bits = 0
        if balls is not None:
            gap = subtract(*balls)
            if gap.is_nonzero:
                return False
            zero_bits = _zero_bits(left, right, balls)
            if max(gap.size, gap.error) + 1 < -zero_bits:
                return True
            wanted_bits = bits + math.ceil(gap.error + zero_bits) + GUARD_BITS
        if bits == MAX_BITS:
            raise TooCostly(f"more than {MAX_BITS} bits would be needed to tell the values apart")
        bits = min(MAX_BITS, max(2 * bits, wanted_bits))


def _balls(left: Expression, right: Expression, bits: int, work: Work) -> tuple[Ball, Ball] | bool | None:
    """Both values; False if only one has any; None if that takes more bits."""
    balls: list[Ball | None] = []
    for expression in (left, right):
        try:
            balls.append(approximate(expression, bits, work))
        except Undefined:
            balls.append(None)
        except Imprecise:
            return None
    if balls[0] is None and balls[1] is None:
        raise Undefined("neither has a value")
    return False if balls[0] is None or balls[1] is None else (balls[0], balls[1])


def _zero_bits(left: Expression, right: Expression, balls: tuple[Ball, Ball]) -> float:
    """b such that a difference below 2^-b is zero: as proved, or else by rule."""
    proved = separation_bits(difference(left, right))
    if proved is not None and proved <= MAX_BITS / 2:
        return proved
    written = sum(
        node.value.numerator.bit_length() + node.value.denominator.bit_length()
        for expression in (left, right)
        for node in nodes(expression)
        if isinstance(node, Number)
    )
    smallest = min([0.0, *(ball.size for ball in balls if ball.is_nonzero)])
    return RULE_BITS + 4 * written - smallest


def _same_at_points(left: Expression, right: Expression, names: list[str], work: Work) -> bool:
    if len(names) > MAX_VARIABLES:
        raise TooCostly(f"more than {MAX_VARIABLES} variables")
    for is_complex in (Name("i") in (*nodes(left), *nodes(right)), True):
        num_agreed = 0
        for point in _points(names):
            agrees = _agree_at(left, right, point, work, is_complex=is_complex)
            if agrees is False:
                return False
            num_agreed += agrees is True
            if num_agreed == NUM_POINTS:
                return True
        if num_agreed >= MIN_POINTS:
            return True
    raise TooCostly("there is no point where both have a value")


def _agree_at(left: Expression, right: Expression, point: Point, work: Work, *, is_complex: bool) -> bool | None:
    """None where a side has no value, or no real one: two formulas may differ in where they are defined."""
    try:
        here = fold(left, work, point), fold(right, work, point)
        if isinstance(here[0], Number) and isinstance(here[1], Number):
            return here[0] == here[1]
        balls = [approximate(value, 2 * FIRST_BITS, work) for value in here]
        if not is_complex and not all(is_real(ball) for ball in balls):
            return None
        return _same_constants(*here, work)
    except (Undefined, Imprecise):
        return None


_RANGES = ((0.05, 0.95), (-4.0, -1.0), (1.0, 4.0), (-0.95, -0.05), (4.0, 30.0), (-30.0, -4.0), (-1.0, 1.0))


def _points(names: list[str]) -> Iterator[Point]:
    """Fixed rational points: in (0, 1) and outside, positive and negative, then any."""
    for index in range(MAX_POINTS if names else 1):
        rng = random.Random(f"{index} {' '.join(names)}")
        low, high = _RANGES[index % len(_RANGES)]
        yield {name: Fraction(rng.randint(math.ceil(low * 1009), math.floor(high * 1009)), 1009) for name in names}
