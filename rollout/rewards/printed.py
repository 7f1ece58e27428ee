"""Whether a program printed what was expected of it."""

import math
import re

TOLERANCE = 1e-6
"""Absolute, and relative to what is expected."""
_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d++(\.\d*+)?|\.\d++)([eE][+-]?\d++)?", re.ASCII)
"""Gives nothing back: programs print long tokens, and this is to be one pass."""
MAX_SHOWN_CHARS = 80


def difference(printed: str, expected: str) -> str | None:
    """Where they first differ, None if they agree.

    Line by line, and token by token in a line: blanks between tokens and at the ends of a line count as one, empty
    lines at the end as none. Case matters. Where a number with a point or an exponent is expected, any decimal number
    within the tolerance is equal to it; everything else, whole numbers too, must be the same text.
    """
    found, wanted = _lines(printed), _lines(expected)
    for number, (line, other) in enumerate(zip(found, wanted, strict=False), start=1):
        if line != other and not _is_same(line.split(), other.split()):
            return f"line {number}: {line[:MAX_SHOWN_CHARS]!r}, expected {other[:MAX_SHOWN_CHARS]!r}"
    if len(found) != len(wanted):
        return f"{len(found)} lines, expected {len(wanted)}"
    return None


def _lines(text: str) -> list[str]:
    return text.replace("\r\n", "\n").rstrip().split("\n")


def _is_same(found: list[str], wanted: list[str]) -> bool:
    return len(found) == len(wanted) and all(map(_is_same_token, found, wanted))


def _is_same_token(found: str, wanted: str) -> bool:
    if found == wanted:
        return True
    if _DECIMAL.fullmatch(wanted) is None or _NUMBER.fullmatch(found) is None:
        return False
    return math.isclose(float(found), float(wanted), rel_tol=TOLERANCE, abs_tol=TOLERANCE)
