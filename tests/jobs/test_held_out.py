import pytest

from towline.jobs.held_out import accuracy_row
from towline.storage.errors import RewardError
from towline.storage.records import Score, ScoreStatus


def score(total: float, status: ScoreStatus = ScoreStatus.OK) -> Score:
    return Score(
        parts={"exact_match": total},
        part_status={"exact_match": status},
        part_seconds={"exact_match": 0.0},
        total=total,
        status=status,
        seconds=0.0,
        detail="worker died",
    )


def test_what_could_not_be_judged_is_counted_and_left_out_of_the_accuracy():
    failed = score(float("nan"), ScoreStatus.FAILED)
    row = accuracy_row(3, [score(1.0), score(0.0), failed, score(1.0), score(1.0)])
    assert (row["version"], row["accuracy"], row["num_prompts"], row["num_failed"]) == (3, 0.75, 4, 1)
    assert row["low"] < 0.75 < row["high"]


def test_no_judged_answer_is_an_error_and_not_an_accuracy_of_zero():
    with pytest.raises(RewardError, match="version 3: none of 2 answers could be judged, for example: worker died"):
        accuracy_row(3, [score(float("nan"), ScoreStatus.TIMEOUT)] * 2)
