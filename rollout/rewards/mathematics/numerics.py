"""The value of an expression without variables to any precision, with a bound on its error, and within bounds of cost.

The bound is a running error analysis: each operation adds its rounding to what the errors of its arguments can make of
its result. Functions take their principal values, except that an odd root of a negative number is the real one, as at
school.
"""

import math
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from mpmath import MPContext

from towline.rollout.rewards.mathematics.expression import ONE, Apply, Expression, Number, Undefined
from towline.rollout.rewards.mathematics.work import TooCostly, Work

MAX_LOG2_SIZE = 2.0**40
"""Of a value; a power tower leaves it at once."""
MAX_LOG2_EXPONENT = 39.0
MAX_LOG2_FACTORIAL = 34.0
MAX_FACTORIAL_BITS = 800
"""Of precision: mpmath's gamma function takes minutes for what the others do in milliseconds."""
MAX_LOG2_ARGUMENT = 2_000
"""Of the argument of a periodic function: reducing it needs as many digits of pi as it has."""
_ROUNDING = 3
"""log2 of how many units in the last place one operation may be wrong."""
_SURE = 4
"""A value with an error of less than 2^-4 of it is not zero."""

_per_thread = threading.local()


class Imprecise(Exception):
    """The precision does not suffice to tell whether a divisor is zero, or between which integers a value lies."""


class Ball(NamedTuple):
    value: Any
    """`mpf` or `mpc`."""
    error: float
    """log2 of a bound on its absolute error."""

    @property
    def size(self) -> float:
        """log2 of the absolute value, at most 1 too large; minus infinity for 0."""
        return float(context().mag(self.value)) if self.value else -math.inf

    @property
    def is_nonzero(self) -> bool:
        return self.size - _SURE > self.error


def context() -> Any:
    """The mpmath context of this thread: its precision is a state that threads must not share."""
    if not hasattr(_per_thread, "context"):
        _per_thread.context = MPContext()
    return _per_thread.context


def approximate(expression: Expression, bits: int, work: Work) -> Ball:
    """The value, worked out with `bits` of precision.

    Raises:
        Undefined: there is no such value.
        Imprecise: more bits may tell.
        TooCostly: a bound was passed.
    """
    mp = context()
    mp.prec = bits
    try:
        ball = _Evaluation(mp, bits, work).ball(expression)
    except (ZeroDivisionError, ValueError) as error:
        raise Undefined("no value") from error
    except ArithmeticError as error:
        raise TooCostly("a value out of range") from error
    if not mp.isfinite(ball.value):
        raise Undefined("no finite value")
    return ball


def subtract(left: Ball, right: Ball) -> Ball:
    return Ball(left.value - right.value, max(left.error, right.error) + 2)


def is_real(ball: Ball) -> bool:
    """Whether the imaginary part is no more than the error."""
    imaginary = ball.value.imag
    return not imaginary or float(context().mag(imaginary)) <= ball.error + 2


class _Evaluation:
    def __init__(self, mp: Any, bits: int, work: Work) -> None:
        self._mp, self._bits, self._work = mp, bits, work
        self._cheap, self._dear = 1.5 + bits / 300, 25 + bits**1.5 / 150  # microseconds, as measured

    def ball(self, expression: Expression, *, is_angle: bool = False) -> Ball:
        mp = self._mp
        if isinstance(expression, Number):
            self._work.spend(self._cheap)
            return self._rounded(mp.mpf(expression.value.numerator) / expression.value.denominator)
        if not isinstance(expression, Apply):
            return self._constant(expression.name)
        operation, arguments = expression.operation, expression.arguments
        if operation == "^":
            return self._power(self.ball(arguments[0]), arguments[1])
        if operation == "root":
            return self._root(self.ball(arguments[0]), arguments[1])
        passes_angle = operation in _PERIODIC or (is_angle and operation in _ARITHMETIC)
        balls = [self.ball(argument, is_angle=passes_angle) for argument in arguments]
        if operation == "+":
            return self._sum(balls)
        if operation == "*":
            return self._product(balls)
        if operation == "degrees":
            return self._product([balls[0], self._rounded(mp.pi / 180)]) if is_angle else balls[0]
        return self._apply(operation, balls)

    def _rounded(self, value: Any, error: float = -math.inf) -> Ball:
        rounding = float(self._mp.mag(value)) - self._bits + _ROUNDING if value else -math.inf
        return Ball(value, max(error, rounding) + (1 if error > -math.inf else 0))

    def _constant(self, name: str) -> Ball:
        self._work.spend(self._cheap)
        if name == "i":
            return Ball(self._mp.mpc(0, 1), -math.inf)
        if name not in ("pi", "e"):
            raise Undefined(f"{name} has no value")
        return self._rounded(+self._mp.pi if name == "pi" else +self._mp.e)

    def _sum(self, balls: list[Ball]) -> Ball:
        self._work.spend(self._cheap * len(balls))
        error = max(ball.error for ball in balls) + math.log2(len(balls))
        return self._rounded(self._mp.fsum(ball.value for ball in balls), error)

    def _product(self, balls: list[Ball]) -> Ball:
        self._work.spend(self._cheap * len(balls))
        product = balls[0]
        for ball in balls[1:]:
            error = max(product.error + max(ball.size, ball.error), ball.error + product.size) + 1
            product = self._rounded(product.value * ball.value, error)
        return product

    def _quotient(self, top: Ball, bottom: Ball) -> Ball:
        self._work.spend(self._cheap)
        self._demand_nonzero(bottom)
        error = max(top.error - bottom.size, bottom.error + top.size - 2 * bottom.size) + 4
        return self._rounded(self._mp.mpmathify(top.value) / bottom.value, error)

    def _demand_nonzero(self, ball: Ball) -> None:
        if not ball.value and ball.error == -math.inf:
            raise Undefined("zero where it must not be")
        if not ball.is_nonzero:
            raise Imprecise

    def _apply(self, operation: str, balls: list[Ball]) -> Ball:
        self._work.spend(self._cheap if operation in ("-", "/", "abs") else self._dear)
        rule = _RULES.get(operation)
        if rule is None:
            raise TooCostly(f"no rule for {operation} of such values")
        return rule(self, *balls)

    def _bound(self, ball: Ball, max_log2: float) -> None:
        if ball.size > max_log2:
            raise TooCostly("a value out of range")
        if ball.error > 0:
            raise Imprecise

    def _on_axis(self, ball: Ball) -> Any:
        """The value; on the real axis if it may lie there, since roots and logarithms are cut along it."""
        return ball.value.real if is_real(ball) else ball.value

    def _power(self, base: Ball, exponent: Expression) -> Ball:
        mp = self._mp
        self._work.spend(self._dear)
        if isinstance(exponent, Number):
            return self._rational_power(base, exponent)
        power = self.ball(exponent)
        self._demand_nonzero(base)
        value = self._on_axis(base)
        self._bound_power(base, power.size)
        logarithm = Ball(mp.log(value), base.error - base.size + _ROUNDING)
        relative = max(logarithm.error + power.size, power.error + logarithm.size)
        if relative > -_SURE:
            raise Imprecise
        result = mp.power(value, power.value)
        return self._rounded(result, relative + float(mp.mag(result)) + 2)

    def _rational_power(self, base: Ball, exponent: Number) -> Ball:
        mp = self._mp
        top, bottom = exponent.value.numerator, exponent.value.denominator
        log2_exponent = math.log2(abs(top)) - math.log2(bottom) if top else 0.0
        if not base.is_nonzero and top > 0:
            if not base.value and base.error == -math.inf:
                return base
            size = max(base.size, base.error) + 1
            self._bound_power(base, log2_exponent)
            return Ball(mp.mpf(0), size * top / bottom + 1)
        self._demand_nonzero(base)
        self._bound_power(base, log2_exponent)
        relative = base.error - base.size + max(log2_exponent, 0.0) + _ROUNDING
        # The rounding of the exponent is one of the logarithm of the result.
        relative = max(relative, log2_exponent + math.log2(max(1.0, abs(base.size))) - self._bits + _ROUNDING)
        if relative > -_SURE:
            raise Imprecise
        value = self._on_axis(base)
        if bottom == 1:
            result = mp.power(value, top)
        elif bottom % 2 and mp.im(value) == 0 and mp.re(value) < 0:
            result = mp.power(-mp.re(value), mp.mpf(top) / bottom) * (-1 if top % 2 else 1)
        else:
            result = mp.power(value, mp.mpf(top) / bottom)
        return self._rounded(result, relative + float(mp.mag(result)))

    def _bound_power(self, base: Ball, log2_exponent: float) -> None:
        if log2_exponent > 64 or 2.0**log2_exponent * max(1.0, abs(base.size)) > MAX_LOG2_SIZE:
            raise TooCostly("a power out of range")

    def _root(self, radicand: Ball, degree: Expression) -> Ball:
        if not isinstance(degree, Number):
            return self._power(radicand, Apply("/", (ONE, degree)))
        if not degree.value:
            raise Undefined("a root of degree zero")
        self._work.spend(self._dear / 20)
        if degree.value == 2 and radicand.is_nonzero:
            result = self._mp.sqrt(self._on_axis(radicand))
            return self._rounded(result, radicand.error - radicand.size + float(self._mp.mag(result)) + 1)
        return self._rational_power(radicand, Number(1 / degree.value))

    def exponential(self, name: str, ball: Ball) -> Ball:
        self._bound(ball, MAX_LOG2_EXPONENT)
        result = getattr(self._mp, name)(ball.value)
        slope = self._mp.mag(self._mp.exp(abs(ball.value.real))) if name != "exp" else self._mp.mag(result)
        return self._rounded(result, ball.error + float(slope) + 2)

    def logarithm(self, ball: Ball) -> Ball:
        self._demand_nonzero(ball)
        return self._rounded(self._mp.log(self._on_axis(ball)), ball.error - ball.size + _ROUNDING)

    def wave(self, name: str, ball: Ball) -> Ball:
        """Sine or cosine, which grow with the imaginary part of their argument."""
        self._bound(ball, MAX_LOG2_ARGUMENT)
        height = abs(ball.value.imag)
        if height > MAX_LOG2_ARGUMENT:
            raise TooCostly("a value out of range")
        result = getattr(self._mp, name)(ball.value)
        return self._rounded(result, ball.error + 1.5 * float(height) + 2)

    def inverse_wave(self, name: str, ball: Ball) -> Ball:
        """Arc sine or arc cosine: near 1 and -1 the error is that of a square root."""
        value = self._on_axis(ball)
        gap = Ball(1 - value * value, ball.error + max(ball.size, 0.0) + 2)
        error = ball.error - gap.size / 2 + 3 if gap.is_nonzero else max(gap.error, gap.size) / 2 + 2
        return self._rounded(getattr(self._mp, name)(value), error)

    def arc_tangent(self, ball: Ball) -> Ball:
        if not is_real(ball):
            raise TooCostly("the arc tangent of a complex number")
        return self._rounded(self._mp.atan(ball.value.real), ball.error)

    def factorial(self, ball: Ball) -> Ball:
        if self._bits > MAX_FACTORIAL_BITS:
            raise TooCostly("a factorial of no whole number to so many digits")
        self._work.spend(20 * self._dear)
        self._bound(ball, MAX_LOG2_FACTORIAL)
        value = self._on_axis(ball) + 1
        if self._mp.im(value) == 0 and value <= 0 and abs(value - self._mp.nint(value)) < self._mp.ldexp(1, -20):
            raise Undefined("the factorial of a negative number")
        result = self._mp.gamma(value)
        steepness = 24 if value.real < 1 else max(2.0, math.log2(max(2.0, ball.size)) + 2)
        return self._rounded(result, ball.error + float(self._mp.mag(result)) + steepness)

    def integer_part(self, name: str, ball: Ball) -> Ball:
        if not is_real(ball):
            raise Undefined("complex numbers have no order")
        if ball.size > self._bits:
            raise TooCostly("a value out of range")
        cut = getattr(self._mp, name)
        margin = self._mp.ldexp(1, math.ceil(ball.error)) if ball.error > -math.inf else 0
        low, high = cut(ball.value.real - margin), cut(ball.value.real + margin)
        if low != high:
            raise Imprecise
        return Ball(low, -math.inf)

    def extreme(self, choose: Callable[..., Any], *balls: Ball) -> Ball:
        if not all(is_real(ball) for ball in balls):
            raise Undefined("complex numbers have no order")
        return Ball(choose(ball.value.real for ball in balls), max(ball.error for ball in balls))

    def negated(self, ball: Ball) -> Ball:
        return Ball(-ball.value, ball.error)

    def absolute(self, ball: Ball) -> Ball:
        return self._rounded(abs(ball.value), ball.error)

    def quotient(self, top: Ball, bottom: Ball) -> Ball:
        return self._quotient(top, bottom)

    def reciprocal(self, ball: Ball) -> Ball:
        return self._quotient(Ball(self._mp.mpf(1), -math.inf), ball)

    def binomial(self, upper: Ball, lower: Ball) -> Ball:
        rest = self._sum([upper, self.negated(lower)])
        return self._quotient(self.factorial(upper), self._product([self.factorial(lower), self.factorial(rest)]))


def _of_quotient(top: str, bottom: str) -> Callable[..., Ball]:
    return lambda do, ball: do.quotient(do.wave(top, ball), do.wave(bottom, ball))


_ARITHMETIC = frozenset({"+", "*", "-", "/", "degrees"})
_PERIODIC = frozenset({"sin", "cos", "tan", "cot", "sec", "csc"})
_RULES: dict[str, Callable[..., Ball]] = {
    "-": _Evaluation.negated,
    "/": _Evaluation.quotient,
    "abs": _Evaluation.absolute,
    "!": _Evaluation.factorial,
    "binom": _Evaluation.binomial,
    "ln": _Evaluation.logarithm,
    "log": lambda do, base, ball: do.quotient(do.logarithm(ball), do.logarithm(base)),
    "exp": lambda do, ball: do.exponential("exp", ball),
    "sinh": lambda do, ball: do.exponential("sinh", ball),
    "cosh": lambda do, ball: do.exponential("cosh", ball),
    "tanh": lambda do, ball: do.quotient(do.exponential("sinh", ball), do.exponential("cosh", ball)),
    "floor": lambda do, ball: do.integer_part("floor", ball),
    "ceil": lambda do, ball: do.integer_part("ceil", ball),
    "max": lambda do, *balls: do.extreme(max, *balls),
    "min": lambda do, *balls: do.extreme(min, *balls),
    "sin": lambda do, ball: do.wave("sin", ball),
    "cos": lambda do, ball: do.wave("cos", ball),
    "tan": _of_quotient("sin", "cos"),
    "cot": _of_quotient("cos", "sin"),
    "sec": lambda do, ball: do.reciprocal(do.wave("cos", ball)),
    "csc": lambda do, ball: do.reciprocal(do.wave("sin", ball)),
    "arcsin": lambda do, ball: do.inverse_wave("asin", ball),
    "arccos": lambda do, ball: do.inverse_wave("acos", ball),
    "arctan": _Evaluation.arc_tangent,
    "arccot": lambda do, ball: do.arc_tangent(do.reciprocal(ball)),
    "arcsec": lambda do, ball: do.inverse_wave("acos", do.reciprocal(ball)),
    "arccsc": lambda do, ball: do.inverse_wave("asin", do.reciprocal(ball)),
}
