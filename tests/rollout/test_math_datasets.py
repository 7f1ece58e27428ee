r"""The graders' verdicts on the golds of MATH-500, GSM8K and AIME: right for themselves, wrong when shuffled.

The answers come with the tests; the worked solutions are read from ../shared/data where that is.
"""

import json
import random
from pathlib import Path

import pytest

from towline.rollout.rewards.math_answer import grade

SHARED_DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
ANSWERS = Path(__file__).parents[1] / "golds" / "math_answers.json"
NUM_SHUFFLES = {"math500": 10, "aime2024": 10, "gsm8k_test": 2, "gsm8k_train": 1}
TRULY_EQUAL = {
    ("120", "120^\\circ"),
    ("5", "x=5"),
    ("x=5", "5"),
    ("30", "30^\\circ"),
    ("-2,1", "1,-2"),
    ("90", "90^\\circ"),
}
"""Different texts among the golds of MATH-500 that are one answer by the rules of docs/rewards.md."""


def answers(name: str) -> list[str]:
    return json.loads(ANSWERS.read_text(encoding="utf-8"))[name]


def solutions(name: str) -> list[tuple[str, str]]:
    """(worked solution, gold answer)"""
    path = SHARED_DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"../shared/data/{name}.jsonl is not here")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if name.startswith("gsm8k"):
        return [(row["answer"], row["answer"].rpartition("####")[2].strip()) for row in rows]
    return [(row["solution"], row["answer"]) for row in rows]


@pytest.mark.parametrize("name", NUM_SHUFFLES)
def test_every_gold_answer_is_right_for_itself(name: str) -> None:
    assert [gold for gold in answers(name) if grade(f"\\boxed{{{gold}}}", gold).value != 1.0] == []


@pytest.mark.parametrize("name", ["math500", "gsm8k_test", "gsm8k_train"])
def test_every_worked_solution_earns_its_gold_answer(name: str) -> None:
    pairs = solutions(name)
    assert [gold for _, gold in pairs] == answers(name)
    assert [(text[-80:], gold) for text, gold in pairs if grade(text, gold).value != 1.0] == []
    assert [(text[-80:], gold) for text, gold in pairs if grade(f"\\boxed{{{gold}}}", text).value != 1.0] == []


@pytest.mark.parametrize("name", NUM_SHUFFLES)
def test_answers_of_other_questions_are_wrong(name: str) -> None:
    golds = answers(name)
    rng = random.Random(0)
    wrong = []
    for _ in range(NUM_SHUFFLES[name]):
        others = rng.sample(golds, len(golds))
        wrong += [
            pair for pair in zip(others, golds, strict=True) if pair[0].replace(",", "") != pair[1].replace(",", "")
        ]
    accepted = [pair for pair in wrong if grade(f"\\boxed{{{pair[0]}}}", pair[1]).value != 0.0]
    assert [pair for pair in accepted if pair not in TRULY_EQUAL and pair[::-1] not in TRULY_EQUAL] == []
    assert len(accepted) < len(wrong) / 1000 or not accepted


def test_the_right_value_in_another_common_form_is_right() -> None:
    """What the integers among the golds look like in boxes of models."""
    forms = ("{}", "{}.0", "${}$", "\\text{{{}}}", "x = {}", "{}\\text{{ units}}", "+{}", "\\frac{{{}}}{{1}}", "({})")
    for gold in {answer for name in NUM_SHUFFLES for answer in answers(name) if answer.isdigit()}:
        for form in forms:
            assert grade(f"<think>\\boxed{{1}}</think>So \\boxed{{{form.format(gold)}}}.", gold).value == 1.0, (
                form,
                gold,
            )
        assert grade(f"\\boxed{{{int(gold):,}}}", gold).value == 1.0
        for wrong in (
            str(int(gold) + 1),
            f"-{int(gold) + 1}",
            f"{gold}.5",
            f"\\frac{{{gold}}}{{7}}",
            f"{gold}1",
            f"{gold}!+3",
        ):
            assert grade(f"\\boxed{{{wrong}}}", gold).value == 0.0 or gold == "0", (wrong, gold)
