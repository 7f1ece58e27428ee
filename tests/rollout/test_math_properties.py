r"""Random expressions: written in two ways they are equal, changed they are not; and nothing that is read raises."""

import random
import re
import sys
import time
from fractions import Fraction

import pytest

import math_cases
from towline.rollout.rewards.math_answer import grade
from towline.rollout.rewards.mathematics.comparison import compare
from towline.rollout.rewards.mathematics.equality import same_value
from towline.rollout.rewards.mathematics.expression import variables
from towline.rollout.rewards.mathematics.folding import fold
from towline.rollout.rewards.mathematics.numerics import approximate
from towline.rollout.rewards.mathematics.parser import parse
from towline.rollout.rewards.mathematics.separation import separation_bits
from towline.rollout.rewards.mathematics.tokens import tokenize
from towline.rollout.rewards.mathematics.typography import to_latex
from towline.rollout.rewards.mathematics.work import TooCostly, Work

PIECES = re.split(
    " ",
    r"\frac \sqrt { } ( ) [ ] \{ \} , ; + - * / ^ _ ! | = < > \le \ge \in \cup \cap \setminus \pm \mp \text{a} "
    r"\text{and} \text{cm} \% \$ $ & \\ \begin{pmatrix} \end{pmatrix} \sin \log \ln \pi \infty x y i e 1 2 3 0 10 0.5 "
    r"1,000 \binom \lfloor \rfloor \mid : ' ^\circ \boxed \overline \mathbb{R} \emptyset and or sqrt pi e5 \left "
    "\\right \\! \\, . \\max \\gcd \\vec \\over \\choose \u00bd \u00b2 \u221a \u00b0 \u2264 \u221e",
)


def tree(rng: random.Random, depth: int) -> tuple:
    """A number, a variable, or an operation on trees; denominators and radicands are numbers above zero."""
    if depth == 0 or rng.random() < 0.2:
        return ("number", rng.randint(1, 20)) if rng.random() < 0.6 else ("name", rng.choice("xyz"))
    operation = rng.choice(["sum", "difference", "product", "ratio", "power", "root"])
    if operation == "ratio":
        return operation, tree(rng, depth - 1), ("number", rng.randint(2, 12))
    if operation == "power":
        return operation, tree(rng, depth - 1), ("number", rng.randint(2, 3))
    if operation == "root":
        return operation, ("number", rng.randint(2, 30))
    return operation, tree(rng, depth - 1), tree(rng, depth - 1)


def in_latex(node: tuple) -> str:
    kind, *parts = node
    if kind in ("number", "name"):
        return str(parts[0])
    texts = [in_latex(part) for part in parts]
    return {
        "sum": "{0}+{1}",
        "difference": "{0}-\\left({1}\\right)",
        "product": "\\left({0}\\right)\\cdot\\left({1}\\right)",
        "ratio": "\\frac{{{0}}}{{{1}}}",
        "power": "\\left({0}\\right)^{{{1}}}",
        "root": "\\sqrt{{{0}}}",
    }[kind].format(*texts)


def in_plain_text(node: tuple) -> str:
    """The same value in other words: sums turned round, differences of products expanded, powers as products."""
    kind, *parts = node
    if kind in ("number", "name"):
        return str(parts[0])
    texts = [in_plain_text(part) for part in parts]
    return {
        "sum": "({1} + {0})",
        "difference": "(-({1}) + {0})",
        "product": "({1})({0})",
        "ratio": "({0})*2/({1}*2)",
        "power": "({0})^{1}",
        "root": "sqrt({0})",
    }[kind].format(*texts)


@pytest.mark.parametrize("seed", range(60))
def test_a_random_expression_equals_itself_in_another_form_and_not_when_changed(seed: int) -> None:
    rng = random.Random(seed)
    node = tree(rng, 4)
    latex, plain = in_latex(node), in_plain_text(node)
    assert compare(plain, latex).is_equal is True
    assert compare(latex, f"{plain} + 1/10^{{30}}").is_equal is False
    assert compare(latex, f"({plain})*(1 + 10^{{-25}})").is_equal is (compare(latex, "0").is_equal)


@pytest.mark.parametrize("seed", range(30))
def test_reading_agrees_with_floating_point(seed: int) -> None:
    rng = random.Random(1000 + seed)
    node = tree(rng, 4)
    values = {name: Fraction(rng.randint(1, 50), 7) for name in "xyz"}

    def by_hand(node: tuple) -> float:
        kind, *parts = node
        if kind in ("number", "name"):
            return float(values.get(parts[0], parts[0]))
        numbers = [by_hand(part) for part in parts]
        return {
            "sum": lambda a, b: a + b,
            "difference": lambda a, b: a - b,
            "product": lambda a, b: a * b,
            "ratio": lambda a, b: a / b,
            "power": lambda a, b: a**b,
            "root": lambda a: a**0.5,
        }[kind](*numbers)

    expression = parse(tokenize(to_latex(in_latex(node)), groups_digits=False))
    assert variables(expression) <= set("xyz")
    ball = approximate(fold(expression, Work(), values), 80, Work())
    assert float(ball.value) == pytest.approx(by_hand(node), rel=1e-9)


def test_random_pieces_of_notation_never_raise_and_have_no_preferred_side() -> None:
    rng = random.Random(0)
    for _ in range(4000):
        one, other = (
            (" " if rng.random() < 0.3 else "").join(rng.choices(PIECES, k=rng.choice((1, 2, 3, 5, 8, 12, 30, 80))))
            for _ in range(2)
        )
        assert compare(one, other).is_equal is compare(other, one).is_equal, (one, other)
        assert compare(one, one).is_equal in (True, None)
        grade(f"\\boxed{{{one}}}", other)


def test_random_characters_never_raise() -> None:
    rng = random.Random(1)
    for _ in range(1500):
        text = "".join(
            chr(rng.choice((rng.randrange(128), rng.randrange(0x3000), rng.randrange(0xD800, 0xE000))))
            for _ in range(25)
        )
        octets = bytes(rng.randrange(256) for _ in range(25)).decode("utf-8", "surrogateescape")
        assert compare(text, octets).is_equal is compare(octets, text).is_equal
        grade(octets + "\\boxed{" + text + "}", "3")


def test_changed_golds_never_raise() -> None:
    rng = random.Random(2)
    texts = sorted({text for _, *pair, _ in math_cases.PAIRS for text in pair if text})
    for _ in range(3000):
        text = rng.choice(texts)
        place = rng.randrange(len(text))
        changed = text[:place] + rng.choice(PIECES) * rng.randrange(3) + text[place + rng.randrange(2) :]
        assert compare(changed, text).is_equal is compare(text, changed).is_equal, (text, changed)


def test_the_deepest_answer_needs_no_deep_stack() -> None:
    deepest = [
        "\\frac{" * 60 + "x" + "}{2}" * 60, "(" * 58 + "x" + ")" * 58, "2^{" * 58 + "x" + "}" * 58, "\\sin " * 58 + "x",
        "x" + "!" * 58, "x" + "^\\circ" * 500, "1" + "\\pm1" * 50, "\\{" * 29 + "1" + "\\}" * 29, "\\sqrt" * 500,
        "2^" * 500, "(" * 29 + "1,2" + ")" * 29, "x_{" * 50 + "1" + "}" * 50,
    ]  # fmt: skip
    frames, frame = 0, sys._getframe()
    while frame is not None:
        frames, frame = frames + 1, frame.f_back
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(frames + 500)
    try:
        for answer in deepest:
            assert compare(answer, "x+1").is_equal is not None
    finally:
        sys.setrecursionlimit(limit)


def test_a_bound_on_work_ends_the_comparison() -> None:
    left, right = (
        parse(tokenize(text, groups_digits=False)) for text in ("\\sqrt{2}+\\sqrt{3}", "\\sqrt{5+2\\sqrt{6}}")
    )
    assert same_value(left, right, Work())
    with pytest.raises(TooCostly, match="too much work"):
        same_value(left, right, Work(5))


def test_the_separation_bound_of_a_known_near_miss() -> None:
    """sqrt(10^40 + 1) - 10^20 is 5e-21: above its bound, and not taken for zero."""
    expression = parse(tokenize("\\sqrt{10^{40}+1}-10^{20}", groups_digits=False))
    bits = separation_bits(fold(expression, Work()))
    assert bits is not None
    assert 2.0**-bits <= 5e-21
    assert bits < 300
    assert compare("\\sqrt{10^{40}+1}", "10^{20}").is_equal is False
    assert compare("\\sqrt{10^{4000}+1}", "10^{2000}").is_equal is False
    assert compare("\\sqrt{10^{4000}+2\\cdot10^{2000}+1}", "10^{2000}+1").is_equal is True


def test_no_pair_of_cases_takes_long() -> None:
    started = time.process_time()
    for _, gold, prediction, _ in math_cases.PAIRS:
        compare(prediction, gold)
    assert (time.process_time() - started) / len(math_cases.PAIRS) < 0.01
