"""When two outputs are one."""

import random

import pytest

from towline.rollout.rewards.printed import TOLERANCE, difference

SAME = [
    # (printed, expected)
    ("4\n", "4\n"),
    ("4", "4\n"),
    ("4\n\n\n", "4"),
    ("4 \t\n", "4"),
    (" 4", "4"),
    ("1  2\t3", "1 2 3"),
    ("1 2\r\n3\r\n", "1 2\n3\n"),
    ("1\n\n2", "1\n\n2"),
    ("1\n \n2", "1\n\n2"),
    ("", ""),
    ("\n \n", ""),
    ("0.333333", "0.3333333"),
    ("0.3333333", "0.333333"),
    ("1", "1.0"),
    ("1.", "1.0"),
    (".5", "0.5"),
    ("+0.5", "0.5"),
    ("-0.0", "0.0"),
    ("1e3", "1000.0"),
    ("1000", "1e3"),
    ("1E+3", "1e3"),
    ("123456789.123", "123456789.0"),
    ("x = 0.1000000001 m", "x = 0.1 m"),
    ("nan", "nan"),
    ("inf", "inf"),
    ("\u00e9", "\u00e9"),
    ("a\x0bb", "a b"),
]
DIFFERENT = [
    ("5", "4"),
    ("", "4"),
    ("4", ""),
    ("4\n4", "4"),
    ("4", "4\n4"),
    ("\n4", "4"),
    ("1\n2", "1 2"),
    ("1 2", "1\n2"),
    ("1\n\n2", "1\n2"),
    ("12", "1 2"),
    ("1 2", "12"),
    ("yes", "YES"),
    ("1.0", "1"),
    ("1.0000001", "1"),
    ("01", "1"),
    ("+1", "1"),
    ("1000000000000000001", "1000000000000000000"),
    ("1_000.0", "1000.0"),
    ("0x10", "16.0"),
    ("1,5", "1.5"),
    ("0.34", "0.33"),
    ("0.333334", "0.333330"),
    ("1000000.0", "1000002.0"),
    ("-0.5", "0.5"),
    ("0.00001", "0.0"),
    ("nan", "1.0"),
    ("1.0", "nan"),
    ("NaN", "nan"),
    ("infinity", "inf"),
    ("1e999", "1.0"),
    ("1e400", "1e308"),
    ("1e", "1.0"),
    ("e", "1.0"),
    (".", "0.0"),
    ("1.5.0", "1.5"),
    ("1.5 ", "1.5 2.5"),
    ("[0.5]", "[0.50]"),
    ("\u0661.5", "1.5"),
    ("e\u0301", "\u00e9"),
    ("\ufffd", "\u00e9"),
    ("a\x00", "a"),
]


@pytest.mark.parametrize(("printed", "expected"), SAME)
def test_these_agree(printed: str, expected: str) -> None:
    assert difference(printed, expected) is None


@pytest.mark.parametrize(("printed", "expected"), DIFFERENT)
def test_these_differ(printed: str, expected: str) -> None:
    assert difference(printed, expected) is not None


@pytest.mark.parametrize(
    ("printed", "expected", "why"),
    [
        ("1\n2\n3", "1\n5\n6", "line 2: '2', expected '5'"),
        ("1", "1\n2", "1 lines, expected 2"),
        ("1\n2\n3", "1", "3 lines, expected 1"),
        ("", "1", "line 1: '', expected '1'"),
        ("x" * 1000, "y", f"line 1: {'x' * 80!r}, expected 'y'"),
    ],
)
def test_the_first_difference_is_shown(printed: str, expected: str, why: str) -> None:
    assert difference(printed, expected) == why


TOKENS = [
    "0",
    "1",
    "-17",
    "3.25",
    "1e-9",
    "1e300",
    "-0.0",
    "nan",
    "inf",
    "Yes",
    "NO",
    "\u03c0",
    "\ud800",
    ".",
    "-",
    "[1,",
]


def random_text(rng: random.Random) -> str:
    lines = (" ".join(rng.choices(TOKENS, k=rng.randrange(5))) for _ in range(rng.randrange(1, 6)))
    return "\n".join(lines)


def spread(text: str, rng: random.Random) -> str:
    """The same tokens in the same lines, with other blanks."""
    blanks = (" ", "\t", "   ", " \t ")
    lines = []
    for line in text.rstrip().split("\n"):
        between = rng.choice(blanks).join(line.split())
        lines.append(rng.choice(["", *blanks]) + between + rng.choice(["", *blanks]))
    return rng.choice(["\n", "\r\n"]).join(lines) + rng.choice(["", "\n", "\n\n \n", "\r\n"])


def test_every_text_agrees_with_itself_however_it_is_spread() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        text = random_text(rng)
        assert difference(text, text) is None
        assert difference(spread(text, rng), text) is None, text
        assert difference(text, spread(text, rng)) is None, text


def test_a_changed_token_is_found() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        lines = [rng.choices(TOKENS, k=rng.randrange(1, 5)) for _ in range(rng.randrange(1, 6))]
        expected = "\n".join(" ".join(line) for line in lines)
        line = rng.choice(lines)
        place = rng.randrange(len(line))
        line[place] += "x"
        printed = "\n".join(" ".join(line) for line in lines)
        assert difference(printed, expected) is not None, (printed, expected)


def test_lines_cannot_move_or_go() -> None:
    rng = random.Random(2)
    for _ in range(500):
        lines = [f"{number} {rng.choice(TOKENS)}" for number in range(rng.randrange(2, 8))]
        expected = "\n".join(lines)
        fewer = lines[:-1]
        assert difference("\n".join(fewer), expected) is not None
        assert difference(expected, "\n".join(fewer)) is not None
        assert difference("\n".join(lines[::-1]), expected) is not None
        assert difference(" ".join(lines), expected) is not None


def test_the_tolerance_is_absolute_near_nought_and_relative_beyond() -> None:
    rng = random.Random(3)
    for _ in range(1000):
        value = rng.choice([-1, 1]) * 10 ** rng.uniform(-12, 12)
        allowed = TOLERANCE * max(1.0, abs(value))
        for share, agrees in ((0.0, True), (0.5, True), (-0.5, True), (2.0, False), (-2.0, False)):
            printed = repr(value + share * allowed)
            assert (difference(printed, f"{value:.17e}") is None) is agrees, (printed, value)
