"""The run ends where surely too many completions have no score, and three of them are named."""

import pytest

from scored_groups import completion, score, scored_group
from towline.jobs.failed_scores import WINDOW_STEPS, FailedScores, examples
from towline.storage.errors import FailedScoresError
from towline.trainer.rollout_batch import ScoredGroup

NAN = float("nan")


def step_of(num_completions: int, num_failed: int, *, row: int = 0) -> list[ScoredGroup]:
    rewards = [NAN] * num_failed + [1.0] * (num_completions - num_failed)
    return [scored_group([1], [completion([2])] * num_completions, rewards, row=row)]


@pytest.mark.parametrize(
    ("num_completions", "num_failed", "ends"),
    [
        (16, 1, False),
        (16, 3, False),  # 19 %, which a rate of 10 % brings in one step of five
        (16, 8, True),
        (8, 4, True),
        (1000, 100, False),
        (1000, 125, False),
        (1000, 140, True),
        (4, 4, True),
    ],
)
def test_one_step_ends_the_run_if_the_rate_is_surely_above(num_completions: int, num_failed: int, ends: bool) -> None:
    failed = FailedScores(0.1)
    if not ends:
        failed.judge(0, step_of(num_completions, num_failed))
        return
    with pytest.raises(FailedScoresError, match=rf"step 0: {num_failed} of {num_completions} completions could not"):
        failed.judge(0, step_of(num_completions, num_failed))


def test_a_rate_that_one_small_step_does_not_show_ends_the_run_later() -> None:
    failed = FailedScores(0.1)
    for step in range(2):
        failed.judge(step, step_of(16, 4))
    # 8 of 32 may be 8.7 %, 12 of 48 are 10.5 % or more.
    with pytest.raises(FailedScoresError, match=r"step 2: 12 of 48 completions of the last 3 steps .* \(25 %\)"):
        failed.judge(2, step_of(16, 4))


def test_five_per_cent_in_small_steps_never_end_a_run() -> None:
    failed = FailedScores(0.1)
    for step in range(400):
        failed.judge(step, step_of(20, 1))


def test_what_is_long_past_no_longer_counts() -> None:
    failed = FailedScores(0.3)
    for step in range(100):
        failed.judge(step, step_of(20, 9 if step % WINDOW_STEPS == 0 else 0))


@pytest.mark.parametrize(("max_share", "num_failed", "ends"), [(0.0, 0, False), (0.0, 1, True), (1.0, 50, False)])
def test_the_ends_of_the_scale(max_share: float, num_failed: int, ends: bool) -> None:
    failed = FailedScores(max_share)
    if ends:
        with pytest.raises(FailedScoresError):
            failed.judge(0, step_of(50, num_failed))
    else:
        failed.judge(0, step_of(50, num_failed))


def test_three_examples_are_named_different_reasons_first() -> None:
    details = ["a: ZeroDivisionError at x.py:3", "a: ZeroDivisionError at x.py:3", "", "b: no answer\nwithin 5 s", "c"]
    scores = [score(1.0), *(score(NAN, detail=detail) for detail in details)]
    group = scored_group([1], [completion([2])] * len(scores), scores, row=7)
    assert examples([group]) == [
        "  row 7, completion 1 '': a: ZeroDivisionError at x.py:3",
        "  row 7, completion 3 '': no reason given",
        "  row 7, completion 4 '': b: no answer within 5 s",
    ]
    with pytest.raises(FailedScoresError) as raised:
        FailedScores(0.1).judge(4, [group])
    first, *named, mend = str(raised.value).split("\n")
    assert first == "step 4: 5 of 6 completions could not be scored (83 %), and scoring.max_failed allows 10 %"
    assert named == examples([group])
    assert "towline samples --step 4 --failed" in mend
