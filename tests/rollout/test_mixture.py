import math
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.mixture import BUILT_IN, Reward, RewardPart, load_reward, score
from towline.rollout.rewards.verdict import Verdict
from towline.storage.records import ScoreStatus


def _part(function: Reward, name: str = "part", weight: float = 1.0) -> RewardPart:
    return RewardPart(name=name, weight=weight, function=function)


def test_the_total_is_the_weighted_sum_and_each_part_is_kept() -> None:
    parts = [_part(load_reward("math_answer", Path()), "correct", 1.0), _part(lambda c, g: 3, "three", -0.5)]
    result = score(parts, "\\boxed{7}", "7")
    assert (result.parts, result.total, result.status) == ({"correct": 1.0, "three": 3.0}, -0.5, ScoreStatus.OK)
    assert result.seconds > 0


def test_conditions_and_floors_shape_the_total_and_not_the_parts() -> None:
    parts = [
        RewardPart(name="right", weight=1.0, function=lambda c, g: float(c == g)),
        RewardPart(name="short", weight=0.5, function=lambda c, g: 0.5, when={"right": 1.0}),
        RewardPart(name="nice", weight=2.0, function=lambda c, g: -100.0, floor=-0.25),
    ]
    right, wrong = score(parts, "7", "7"), score(parts, "8", "7")
    assert (right.parts, right.total) == ({"right": 1.0, "short": 0.5, "nice": -100.0}, 1.0 + 0.25 - 0.5)
    assert (wrong.parts, wrong.total) == ({"right": 0.0, "short": 0.5, "nice": -100.0}, -0.5)


def test_a_failed_part_spoils_the_total_but_not_its_neighbours() -> None:
    parts = [_part(lambda c, g: 1 / 0, "broken", 0.0), _part(lambda c, g: 1.0, "fine")]
    result = score(parts, "", "")
    assert math.isnan(result.parts["broken"])
    assert math.isnan(result.total)
    assert (result.parts["fine"], result.status) == (1.0, ScoreStatus.FAILED)
    assert result.part_status == {"broken": ScoreStatus.FAILED, "fine": ScoreStatus.OK}
    assert result.seconds == sum(result.part_seconds.values()) > 0
    assert result.detail.startswith("broken: ZeroDivisionError: division by zero at ")
    assert __file__ in result.detail


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        (0.25, 0.25),
        (True, 1.0),
        (False, 0.0),
        (2, 2.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (Verdict(value=0.5, detail="half"), 0.5),
    ],
)
def test_numbers_and_verdicts_are_values(answer: float | Verdict, value: float) -> None:
    result = score([_part(lambda c, g: answer)], "", "")
    assert (result.total, result.status) == (value, ScoreStatus.OK)


@pytest.mark.parametrize(
    "answer",
    [
        math.nan,
        math.inf,
        -math.inf,
        None,
        "1.0",
        [1.0],
        1j,
        10**400,
        Verdict(value=None),
        Verdict(value=math.nan),
        Verdict(value=1.0, status=ScoreStatus.FAILED),
    ],
    ids=repr,
)
def test_anything_else_is_a_failure_and_not_a_zero(answer: float) -> None:
    result = score([_part(lambda c, g: answer)], "", "")
    assert math.isnan(result.parts["part"])
    assert math.isnan(result.total)
    assert result.status == ScoreStatus.FAILED


def test_a_verdict_may_report_its_own_time_out() -> None:
    result = score([_part(lambda c, g: Verdict(value=None, status=ScoreStatus.TIMEOUT, detail="judge slow"))], "", "")
    assert (result.status, result.detail) == (ScoreStatus.TIMEOUT, "part: judge slow")


EXAMPLES = {
    "code_tests": ("def f(x): return 2 * x", '["assert f(2) == 4"]'),
    "citation": ("It boils [7].", "[7]"),
    "exact_match": ("\\boxed{7}", "7"),
    "format": ("\\boxed{7}", "7"),
    "math_answer": ("\\boxed{7}", "7"),
    "normalised_match": ("\\boxed{7}", "7"),
    "tool_call": ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', '{"name": "f", "arguments": {}}'),
}


@pytest.mark.parametrize("use", BUILT_IN)
def test_every_built_in_reward_is_from_0_to_1(use: str) -> None:
    right, wrong = (score([_part(load_reward(use, Path()))], text, EXAMPLES[use][1]) for text in (EXAMPLES[use][0], ""))
    assert (right.total, right.status) == (1.0, ScoreStatus.OK)
    assert (wrong.total, wrong.status) == (0.0, ScoreStatus.OK)


@pytest.mark.parametrize("use", ["citation", "code_tests", "exact_match", "normalised_match", "tool_call"])
def test_a_gold_answer_that_cannot_be_right_is_a_failure_and_not_a_zero(use: str) -> None:
    result = score([_part(load_reward(use, Path()))], "\\boxed{7}", " ")
    assert (math.isnan(result.total), result.status) == (True, ScoreStatus.FAILED)
    assert "DataError: " in result.detail


def test_a_reward_table_has_a_name_that_can_be_a_column() -> None:
    assert RewardConfig(use="math_answer", weight=1.0).part_name == "math_answer"
    assert RewardConfig(use="rewards/think.py:grade", weight=1.0).part_name == "think.grade"
    assert RewardConfig(use="rewards/think.py:grade", weight=1.0, name="think").part_name == "think"


@pytest.mark.parametrize(
    "table",
    [
        {"use": "format", "weight": math.nan},
        {"use": "format", "weight": math.inf},
        {"use": "", "weight": 1.0},
        {"use": "format"},
        {"use": "format", "weight": 1.0, "name": "a/b"},
        {"use": "format", "weight": 1.0, "wieght": 2.0},
    ],
)
def test_a_bad_reward_table_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RewardConfig.model_validate(table)
