from typing import Any

import pytest

from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.formula import formula

MATH = {"use": "math_answer", "weight": 1}
FORMAT = {"use": "format", "weight": 0.1}


@pytest.mark.parametrize(
    ("rewards", "line"),
    [
        ([MATH], "1.0 · math_answer"),
        ([MATH, FORMAT], "1.0 · math_answer + 0.1 · format"),
        ([MATH, FORMAT | {"weight": -0.5}], "1.0 · math_answer - 0.5 · format"),
        (
            [MATH, FORMAT | {"when": {"math_answer": 1}}, {"use": "mine.py:style", "weight": 2.0, "floor": -1}],
            "1.0 · math_answer + 0.1 · (format where math_answer ≥ 1.0) + 2.0 · max(mine.style, -1.0)",
        ),
        (
            [MATH, {"use": "length", "weight": 0.2, "target_tokens": 9, "when": {"math_answer": 1.0},
                    "converged": {"min_reward": 0.9}}],
            "1.0 · math_answer + 0.2 · (length where math_answer ≥ 1.0 once the rest has converged)",
        ),
    ],
)  # fmt: skip
def test_a_reward_is_one_line(rewards: list[dict[str, Any]], line: str) -> None:
    assert formula([RewardConfig.model_validate(reward) for reward in rewards]) == line
