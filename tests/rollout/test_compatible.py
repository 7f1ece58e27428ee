import re
from typing import Any

import pytest

from towline.rollout.rewards.compatible import refuse_impossible, refuse_slow_tests
from towline.rollout.rewards.config import RewardConfig

MATH = {"use": "math_answer", "weight": 1.0}
FORMAT = {"use": "format", "weight": 0.1}
OWN = {"use": "mine.py:grade", "weight": 1.0, "name": "own"}
LENGTH = {"use": "length", "weight": 0.2, "target_tokens": 5, "when": {"math_answer": 1.0},
          "converged": {"min_reward": 0.9}}  # fmt: skip
CODE = {"use": "code_tests", "weight": 1.0}
OVERLONG = {"use": "overlong", "weight": 1.0, "cache_tokens": 2}
MODEL = {"use": "reward_model", "weight": 1.0, "model": "rm"}
WATCHER = {"use": "reward_model", "weight": 0.0, "model": "other", "name": "watcher"}


def tables(*rewards: dict[str, Any]) -> list[RewardConfig]:
    return [RewardConfig.model_validate(reward) for reward in rewards]


@pytest.mark.parametrize(
    "rewards",
    [
        [MATH],
        [MATH, FORMAT],
        [MATH, FORMAT | {"when": {"math_answer": 1.0}}],
        [MATH, FORMAT | {"when": {"math_answer": 0.5, "own": -7.0}}, OWN | {"when": {"math_answer": 1.0}}],
        [MATH | {"weight": 0.0}, FORMAT | {"when": {"math_answer": 1.0}}],
        [MATH, LENGTH, OVERLONG],
        [MATH, OVERLONG | {"when": {"math_answer": 1.0}}],
        [MATH, OWN | {"floor": -1.0, "weight": -0.5}],
        [MATH, FORMAT, FORMAT | {"name": "again"}],
        [MODEL],
        [MATH, MODEL | {"floor": -2.0, "when": {"math_answer": 1.0}}, WATCHER | {"when": {"reward_model": -3.5}}],
        [MODEL, OVERLONG | {"when": {"reward_model": 7.0}}],
        [MODEL, LENGTH | {"when": {"reward_model": 2.0}}],
        [MODEL, MODEL | {"name": "half", "weight": -0.5}],
    ],
)
def test_what_goes_together_is_accepted(rewards: list[dict[str, Any]]) -> None:
    refuse_impossible(tables(*rewards))


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([MATH, MATH], "two rewards are called math_answer; give one of them another `name`"),
        ([MATH, FORMAT | {"when": {"format": 1.0}}], "format cannot be its own condition"),
        (
            [MATH, FORMAT | {"when": {"math": 1.0}}],
            "format counts when math, which is no part; there are: math_answer, f",
        ),
        ([MATH, FORMAT | {"when": {"math_answer": 0.0}}], "at least 0: always, for math_answer is from 0 to 1"),
        ([MATH, FORMAT | {"when": {"math_answer": 1.5}}], "at least 1.5: never, for math_answer is from 0 to 1"),
        ([MATH, OVERLONG, FORMAT | {"when": {"overlong": -0.5}}], "format counts when overlong, which counts tokens"),
        (
            [MATH | {"when": {"format": 1.0}}, FORMAT | {"when": {"own": 1.0}}, OWN | {"when": {"math_answer": 1.0}}],
            "the conditions go round in a circle",
        ),
        ([OVERLONG], "overlong alone teaches to say nothing"),
        ([MATH | {"weight": 0.0}, FORMAT | {"weight": 0.0}], "math_answer, format: every weight is 0"),
        ([MATH | {"weight": 0.0}, OVERLONG], "math_answer: every weight is 0"),
        ([MATH, LENGTH, LENGTH | {"name": "more"}], 'use = "length" comes more than once'),
        ([MODEL, FORMAT | {"when": {"reward_model": 1.0}}], "let reward_model count when format"),
        ([WATCHER, OVERLONG], "watcher: every weight is 0"),
        ([WATCHER | {"model": "rm"}, MODEL], "watcher has the model of reward_model and would watch itself"),
    ],
)
def test_what_does_not_is_refused_with_the_reason(rewards: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        refuse_impossible(tables(*rewards))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (LENGTH | {"weight": -0.2}, "weight = -0.2 would pay for length"),
        (LENGTH | {"target_tokens": None}, "needs target_tokens"),
        (LENGTH | {"converged": None}, "needs converged"),
        (LENGTH | {"when": {}}, "needs when: wrong answers are not to be short"),
        (LENGTH | {"cache_tokens": 2}, 'cache_tokens is of use = "overlong" alone'),
        (LENGTH | {"floor": -0.5}, "length is from -1 to 0 already"),
        (LENGTH | {"converged": {"min_reward": 0.9, "window": 0}}, "greater than or equal to 1"),
        (LENGTH | {"converged": {"min_reward": 0.9, "tolerance": 0.0}}, "greater than 0"),
        (LENGTH | {"converged": {"window": 3}}, "min_reward"),
        (OVERLONG | {"target_tokens": 2}, 'target_tokens is of use = "length" alone'),
        (MATH | {"converged": {"min_reward": 0.9}}, 'converged is of use = "length" alone'),
        (
            MATH | {"floor": 0.1},
            "floor is for functions of your own and reward models; math_answer is from 0 to 1 already",
        ),
        (MATH | {"when": {"format": float("nan")}}, "finite"),
        (OWN | {"floor": float("-inf")}, "finite"),
        (MATH | {"partial_credit": True}, 'partial_credit is of use = "code_tests" alone'),
        (MATH | {"limit_s": 1.0}, 'limit_s is of use = "code_tests" alone'),
        (CODE | {"limit_s": 0.0}, "greater than 0"),
        (MODEL | {"model": None}, "needs model: the folder of the reward model"),
        (MATH | {"model": "rm"}, 'model is of use = "reward_model" alone'),
        (CODE | {"memory_mib": 1}, "greater than or equal to 16"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(table: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RewardConfig.model_validate(table)


def test_programs_have_less_time_than_their_completion() -> None:
    refuse_slow_tests(tables(MATH, FORMAT), 0.1)
    refuse_slow_tests(tables(MATH, CODE), 4.5)
    refuse_slow_tests(tables(CODE | {"limit_s": 1.0}, CODE | {"limit_s": 2.0, "name": "more"}), 3.5)
    for rewards, limit_s in (([CODE], 4.0), ([CODE, CODE | {"name": "more"}], 5.0), ([CODE | {"limit_s": 60.0}], 5.0)):
        with pytest.raises(ValueError, match="a program that never ends would have no score in place of 0"):
            refuse_slow_tests(tables(*rewards), limit_s)
