"""How near to zero an algebraic number can be without being zero: what turns a numerical zero into a proof.

The bound of Burnikel, Funke, Mehlhorn, Schirra and Schmitt, "A separation bound for real algebraic expressions" (ESA
2001): an expression E of integers, +, -, *, / and k-th roots is U/L of algebraic integers, all of whose conjugates are
at most u and l; unless E = 0, |E| >= 1 / (u^(D-1) * l), D being the product of the k. The argument is one about norms,
so it holds for complex roots too.
"""

import math

from towline.rollout.rewards.mathematics.expression import Apply, Expression, Name, Number

MAX_POWER = 10**6

Bound = tuple[float, float]
"""log2 of u and of l."""


def separation_bits(expression: Expression) -> float | None:
    """b such that |E| >= 2^-b unless E = 0; None if E is not built of rationals, roots and integer powers."""
    roots: dict[Expression, int] = {}
    bound = _bound(expression, roots)
    if bound is None:
        return None
    log2_degree = sum(math.log2(degree) for degree in roots.values())
    if log2_degree > 64:
        return math.inf
    return (2.0**log2_degree - 1) * bound[0] + bound[1]


def _bound(expression: Expression, roots: dict[Expression, int]) -> Bound | None:
    if isinstance(expression, Number):
        return _log2(expression.value.numerator), _log2(expression.value.denominator)
    if isinstance(expression, Name):
        if expression.name != "i":
            return None
        roots[expression] = 2
        return 0.0, 0.0
    if expression.operation in ("^", "root"):
        return _power(expression, roots)
    bounds = [_bound(argument, roots) for argument in expression.arguments]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds):
        return None
    return _combine(expression.operation, known)


def _combine(operation: str, bounds: list[Bound]) -> Bound | None:
    if operation == "-":
        return bounds[0]
    if operation == "*":
        return sum(u for u, _ in bounds), sum(l_ for _, l_ in bounds)
    if operation == "/":
        (u1, l1), (u2, l2) = bounds
        return u1 + l2, l1 + u2
    if operation == "+":
        u, lower = bounds[0]
        for u2, l2 in bounds[1:]:
            u, lower = _log2_sum(u + l2, lower + u2), lower + l2
        return u, lower
    return None


def _power(expression: Apply, roots: dict[Expression, int]) -> Bound | None:
    base, exponent = expression.arguments
    bound = _bound(base, roots)
    if bound is None or not isinstance(exponent, Number) or exponent.value == 0:
        return None
    power = exponent.value if expression.operation == "^" else 1 / exponent.value
    if abs(power.numerator) > MAX_POWER or power.denominator > MAX_POWER:
        return None
    u, lower = bound[0] * abs(power.numerator), bound[1] * abs(power.numerator)
    if power < 0:
        u, lower = lower, u
    degree = power.denominator
    if degree == 1:
        return u, lower
    roots[expression] = degree
    if u >= lower:
        return (u + (degree - 1) * lower) / degree, lower
    return u, ((degree - 1) * u + lower) / degree


def _log2(value: int) -> float:
    return math.log2(abs(value)) if value else 0.0


def _log2_sum(a: float, b: float) -> float:
    high, low = max(a, b), min(a, b)
    return high + math.log2(1 + 2.0 ** max(low - high, -1000.0))
