import math

import pytest

from scored_groups import score
from towline.launcher.score.sample import EarlierScore
from towline.launcher.score.score_json import earlier_score, score_json
from towline.storage.datasets import Rejected


def test_what_is_written_is_read_back_and_a_failure_is_not_a_number() -> None:
    written = score_json(score(math.nan, a=1.0, b=math.nan), {"a": 1.0, "b": 2.0}, "f00")
    assert (written["total"], written["parts"]["b"]["value"]) == (None, None)
    read = earlier_score(written, "s")
    assert repr(read) == repr(EarlierScore(parts={"a": 1.0, "b": math.nan}, total=math.nan))


@pytest.mark.parametrize(
    ("value", "parts", "total"),
    [(1, {}, 1.0), (False, {}, 0.0), ({"a": 1, "b": 0.5}, {"a": 1.0, "b": 0.5}, None), ({"total": 2}, {}, 2.0)],
)
def test_scores_of_others_are_numbers_or_objects_of_them(value: object, parts: dict[str, float], total: float) -> None:
    assert earlier_score(value, "s") == EarlierScore(parts=parts, total=total)
    assert earlier_score(None, "s") is None


@pytest.mark.parametrize("value", ["1", [1], {"a": "1"}, {"parts": {"a": 1}}, {"parts": {"a": {}}}, 10**400])
def test_what_is_no_score_is_refused(value: object) -> None:
    with pytest.raises(Rejected, match='field "s'):
        earlier_score(value, "s")
