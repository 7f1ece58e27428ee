"""Text of a program and of a completion is read in one pass: a pool's worker that hangs in it gives no verdict."""

import time

import pytest

from towline.rollout.rewards.code_block import program
from towline.rollout.rewards.printed import difference

LENGTH = 100_000
LIMIT_S = 5.0
"""Far above the milliseconds of one pass, far below the hours of LENGTH passes."""


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        *(("1" * LENGTH + "x", "1.5"), ("1" * LENGTH + ".", "x"), ("." * LENGTH, "1.5"), ("1e" * LENGTH, "1.5")),
        *(("1." * LENGTH, "1.5"), ("1.5e" + "1" * LENGTH + "x", "1.5"), ("\n" * LENGTH + "x", "1.5")),
        *((" " * LENGTH + "x", "1.5"), ("- " * LENGTH, "1.5 " * LENGTH), ("9" * LENGTH, "1.5"), ("1 " * LENGTH, "1")),
    ],
    ids=range(11),
)
def test_long_output(printed: str, expected: str) -> None:
    began = time.process_time()
    assert difference(printed, expected) is not None
    assert time.process_time() - began < LIMIT_S


@pytest.mark.parametrize(
    "completion",
    [
        *("```" + " " * LENGTH + "x", "```" + "a" * LENGTH + "-", "```\t \t" * LENGTH),
        *(" " * LENGTH + "```", "```\n" * LENGTH, "class " * LENGTH),
        *("`" * LENGTH, "def" + "\n" * LENGTH + "x", "async" + " " * LENGTH + "x", "async def\n" * LENGTH),
    ],
    ids=range(10),
)  # fmt: skip
def test_long_completions(completion: str) -> None:
    began = time.process_time()
    program(completion)
    program(completion, "def f(x):\n", "f")
    assert time.process_time() - began < LIMIT_S


@pytest.mark.parametrize("number", ["1.5", "+1.5", "1.50000001", "15e-1", "1.5E0", "0.15e1", ".15e+1"])
def test_numbers_are_read_as_before(number: str) -> None:
    assert difference(number, "1.5") is None
    assert difference(number + "x", "1.5") is not None


@pytest.mark.parametrize("token", ["nan", "inf", "1_5e-1", "1.5.", "e1", "+", ".", "", "--1.5", "1.5e", "1.5e+"])
def test_what_is_no_number_is_none(token: str) -> None:
    assert difference(token, "1.5") is not None
