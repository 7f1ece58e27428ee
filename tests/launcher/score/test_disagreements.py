import math

import pytest

from scored_groups import score
from towline.launcher.score.disagreements import Disagreements, differs
from towline.launcher.score.sample import EarlierScore, Sample

NAN = math.nan


def sample(where: str, total: float, earlier: EarlierScore | None, **parts: float) -> Sample:
    return Sample(where=where, prompt=0, completion="", gold="", score=score(total, **parts), earlier=earlier)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (1.0, 1.0, False),
        (0.1 + 0.2, 0.3, False),
        (1e9, 1e9 + 0.1, False),
        (0.0, 1e-6, True),
        (1.0, 0.0, True),
        (NAN, NAN, False),
        (NAN, 0.0, True),
        (0.0, NAN, True),
    ],
)
def test_failure_is_no_value_and_rounding_no_difference(old: float, new: float, expected: bool) -> None:
    assert differs(old, new) is expected


def test_parts_of_the_same_name_are_compared_and_three_examples_kept() -> None:
    found = Disagreements()
    for number in range(5):
        earlier = EarlierScore(parts={"a": float(number % 2), "gone": 1.0}, total=float(number % 2))
        found.add(sample(f"line {number}", 0.0, earlier, a=0.0, new=1.0))
    found.add(sample("line 5", 0.0, None, a=0.0, new=1.0))
    assert list(found.by_name) == ["a", "total"]
    assert (found.by_name["a"].num, found.by_name["a"].num_different) == (5, 2)
    assert list(found.lines()) == [
        "  a   2 of 5 differ (40.00%)",
        "    line 1   1 → 0",
        "    line 3   1 → 0",
        "  total   2 of 5 differ (40.00%)",
        "  1 completions have no earlier score",
    ]
    for number in range(5):
        found.add(sample(f"more {number}", 0.0, EarlierScore(parts={"a": NAN}, total=None), a=0.0))
    assert [kept.where for kept, _, _ in found.by_name["a"].examples] == ["line 1", "line 3", "more 0"]
    assert (found.by_name["a"].num_different, found.by_name["total"].num) == (7, 5)


def test_where_nothing_was_compared_nothing_is_said() -> None:
    found = Disagreements()
    found.add(sample("line 1", 0.0, None))
    assert list(found.lines()) == []
