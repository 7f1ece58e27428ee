"""The value of an expression without variables to any precision, with bounds on what mpmath is asked to do.

Functions take their principal values, except that an odd root of a negative number is the real one, as at school.
"""

import threading
from collections.abc import Callable
from typing import Any

from mpmath import MPContext

from towline.rollout.rewards.mathematics.expression import Apply, Expression, Number, Undefined
from towline.rollout.rewards.mathematics.work import TooCostly, Work

MAX_LOG2_SIZE = 2**40
"""Of a value; a power tower leaves it at once."""
MAX_LOG2_ARGUMENT = 2_000
"""Of the argument of a periodic function: reducing it needs as many digits of pi as it has."""

_per_thread = threading.local()


def context() -> Any:
    """The mpmath context of this thread: its precision is a state that threads must not share."""
    if not hasattr(_per_thread, "context"):
        _per_thread.context = MPContext()
    return _per_thread.context


def approximate(expression: Expression, bits: int, work: Work) -> Any:
    """The value as `mpf` or `mpc`, worked out with `bits` of precision.

    Raises:
        Undefined: there is no such value.
        TooCostly: a bound was passed.
    """
    mp = context()
    mp.prec = bits
    try:
        value = mp.mpmathify(_Evaluation(mp, bits, work).value(expression))
    except (ZeroDivisionError, ValueError) as error:
        raise Undefined("no value") from error
    except (OverflowError, ArithmeticError) as error:
        raise TooCostly("a value out of range") from error
    if not mp.isfinite(value):
        raise Undefined("no finite value")
    return value


def log2_size(value: Any) -> float:
    """About log2 of the absolute value; minus infinity for 0."""
    return float(context().mag(value)) if value else float("-inf")


def is_real(value: Any, bits: int) -> bool:
    """Whether the imaginary part is no more than what rounding leaves."""
    imaginary = value.imag
    return not imaginary or log2_size(imaginary) < log2_size(value) - bits // 2


class _Evaluation:
    def __init__(self, mp: Any, bits: int, work: Work) -> None:
        self._mp, self._work = mp, work
        self._cheap, self._dear = 1 + bits / 400, 25 + bits**1.5 / 1000

    def value(self, expression: Expression, *, in_degrees: bool = False) -> Any:
        mp = self._mp
        if isinstance(expression, Number):
            self._work.spend(self._cheap)
            return mp.mpf(expression.value.numerator) / expression.value.denominator
        if not isinstance(expression, Apply):
            return self._constant(expression.name)
        operation = expression.operation
        if operation == "^":
            return self._power(*expression.arguments)
        if operation == "root":
            radicand, degree = expression.arguments
            return self._root(self.value(radicand), degree)
        is_angle = operation in _PERIODIC or (in_degrees and operation in ("+", "*", "-", "/"))
        arguments = [self.value(argument, in_degrees=is_angle) for argument in expression.arguments]
        if operation in ("+", "*"):
            self._work.spend(self._cheap * len(arguments))
            return mp.fsum(arguments) if operation == "+" else mp.fprod(arguments)
        if operation == "degrees":
            return arguments[0] * mp.pi / 180 if in_degrees else arguments[0]
        return self._apply(operation, arguments)

    def _constant(self, name: str) -> Any:
        self._work.spend(self._cheap)
        constants = {"pi": lambda: +self._mp.pi, "e": lambda: +self._mp.e, "i": lambda: self._mp.mpc(0, 1)}
        if name not in constants:
            raise Undefined(f"{name} has no value")
        return constants[name]()

    def _apply(self, operation: str, arguments: list[Any]) -> Any:
        self._work.spend(self._cheap if operation in ("-", "/", "abs") else self._dear)
        if operation in _PERIODIC:
            self._bound(arguments[0], MAX_LOG2_ARGUMENT)
        elif operation in ("exp", "sinh", "cosh", "tanh"):
            self._bound(arguments[0], MAX_LOG2_SIZE.bit_length())
        elif operation in ("!", "binom"):
            self._work.spend(20 * self._dear)
            for argument in arguments:
                self._bound(argument, MAX_LOG2_SIZE.bit_length() - 6)
        elif operation in ("floor", "ceil"):
            self._bound(arguments[0], self._mp.prec)
        rule = _RULES.get(operation)
        if rule is None:
            raise TooCostly(f"no rule for {operation} of such values")
        return rule(self._mp, *arguments)

    def _bound(self, value: Any, max_log2: int) -> None:
        if log2_size(value) > max_log2:
            raise TooCostly("a value out of range")

    def _power(self, base: Expression, exponent: Expression) -> Any:
        mp = self._mp
        value = self.value(base)
        if isinstance(exponent, Number) and exponent.value.denominator % 2 and mp.im(value) == 0 and mp.re(value) < 0:
            self._bound_power(value, exponent.value.numerator)
            self._work.spend(self._dear)
            size = mp.power(-mp.re(value), mp.mpf(exponent.value.numerator) / exponent.value.denominator)
            return -size if exponent.value.numerator % 2 else size
        power = self.value(exponent)
        self._work.spend(self._dear)
        if not value:
            if mp.re(power) <= 0:
                raise Undefined("zero to a power that is not positive")
            return mp.mpf(0)
        self._bound_power(value, power)
        if isinstance(exponent, Number) and exponent.value.denominator == 1:
            return mp.power(value, exponent.value.numerator)
        return mp.power(value, power)

    def _bound_power(self, base: Any, exponent: Any) -> None:
        if not exponent:
            return
        log2_exponent = log2_size(self._mp.mpmathify(exponent))
        if log2_exponent > 64 or 2**log2_exponent * max(1.0, abs(log2_size(base))) > MAX_LOG2_SIZE:
            raise TooCostly("a power out of range")

    def _root(self, radicand: Any, degree: Expression) -> Any:
        mp = self._mp
        self._work.spend(self._dear)
        order = self.value(degree)
        if not order:
            raise Undefined("a root of degree zero")
        if not radicand:
            return mp.mpf(0)
        if order == 2:
            return mp.sqrt(radicand)
        is_odd = isinstance(degree, Number) and degree.value.denominator == 1 and degree.value.numerator % 2 == 1
        if is_odd and mp.im(radicand) == 0 and mp.re(radicand) < 0:
            return -mp.power(-mp.re(radicand), 1 / order)
        self._bound_power(radicand, 1 / order)
        return mp.power(radicand, 1 / order)


def _binomial(mp: Any, upper: Any, lower: Any) -> Any:
    return mp.gamma(upper + 1) / (mp.gamma(lower + 1) * mp.gamma(upper - lower + 1))


def _real(choose: Callable[..., Any]) -> Callable[..., Any]:
    def rule(mp: Any, *values: Any) -> Any:
        if any(mp.im(value) != 0 for value in values):
            raise Undefined("complex numbers have no order")
        return choose(mp, *(mp.re(value) for value in values))

    return rule


_PERIODIC = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc",
})  # fmt: skip
_RULES: dict[str, Callable[..., Any]] = {
    "-": lambda mp, value: -value,
    "/": lambda mp, top, bottom: mp.mpmathify(top) / bottom,
    "abs": lambda mp, value: abs(value),
    "!": lambda mp, value: mp.gamma(value + 1),
    "binom": _binomial,
    "ln": lambda mp, value: mp.log(value),
    "log": lambda mp, base, value: mp.log(value) / mp.log(base),
    "exp": lambda mp, value: mp.exp(value),
    "floor": _real(lambda mp, value: mp.floor(value)),
    "ceil": _real(lambda mp, value: mp.ceil(value)),
    "max": _real(lambda mp, *values: max(values)),
    "min": _real(lambda mp, *values: min(values)),
    "arcsin": lambda mp, value: mp.asin(value),
    "arccos": lambda mp, value: mp.acos(value),
    "arctan": lambda mp, value: mp.atan(value),
    "arccot": lambda mp, value: mp.acot(value),
    "arcsec": lambda mp, value: mp.asec(value),
    "arccsc": lambda mp, value: mp.acsc(value),
    **{name: (lambda mp, value, name=name: getattr(mp, name)(value)) for name in _PERIODIC},
    **{name: (lambda mp, value, name=name: getattr(mp, name)(value)) for name in ("sinh", "cosh", "tanh")},
}
