import pytest

from towline.rollout.rewards.exact_match import grade
from towline.storage.errors import DataError


@pytest.mark.parametrize(
    ("gold", "completion", "value"),
    [
        ("72", r"so \boxed{72}", 1.0),
        ("2 + 70 = 72\n#### 72", r"\boxed{72}", 1.0),
        (r"hence \boxed{72}", r"\boxed{72}", 1.0),
        ("14250", r"\boxed{14,250}", 1.0),
        ("-1,234.5", r"\boxed{-1234.5}", 1.0),
        ("New  York", r"\boxed{ new york }", 1.0),
        ("72", "72", 0.0),
        ("72", "#### 72", 0.0),
        ("72", r"\boxed{72.0}", 0.0),
        ("1/2", r"\boxed{0.5}", 0.0),
        ("12", r"\boxed{1,2}", 0.0),
        ("(1,234)", r"\boxed{(1234)}", 0.0),
        ("72", r"\boxed{7 2}", 0.0),
        ("72", r"\boxed{}", 0.0),
        ("72", r"<think>\boxed{72}", 0.0),
    ],
)
def test_the_box_must_hold_the_gold_answer(gold: str, completion: str, value: float) -> None:
    assert grade(completion, gold).value == value


@pytest.mark.parametrize("gold", ["", " ", "####"])
def test_an_empty_gold_answer_is_an_error_in_the_data(gold: str) -> None:
    with pytest.raises(DataError, match="gold answer is empty"):
        grade(r"\boxed{}", gold)
