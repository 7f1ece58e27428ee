import time

import pytest

from towline.rollout.rewards.math_answer import equivalent, grade
from towline.storage.errors import DataError
from towline.storage.records import ScoreStatus


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        ("14250", "14,250"),
        ("14250", "\\$14{,}250"),
        ("14250", "14\\,250"),
        ("14250", "14\u202f250"),
        ("7325000800", "7,\\! 325,\\! 000,\\! 800"),
        ("1,234.50", "1234.5"),
        ("72", "72."),
        ("72", "72.0"),
        ("72", " +72 "),
        ("72", "$72$"),
        ("72", "\\(72\\)"),
        ("72", "\\text{72}"),
        ("0.5", ".5"),
        ("0", "-0"),
        ("-8", "\u22128"),
        ("-8", "\u20138"),
        ("-5", "-\\$5"),
        ("3/8", "\\frac{3}{8}"),
        ("3/8", "0.375"),
        ("\\frac38", "0.375"),
        ("\\frac12", "\\dfrac{2}{4}"),
        ("-\\frac{1}{2}", "\\frac{-1}{2}"),
        ("-1/2", "1/-2"),
        ("7.5", "7\\frac{1}{2}"),
        ("\\frac{47}{6}", "7 5/6"),
        ("-1.5", "-1 1/2"),
        ("50\\%", "50%"),
        ("5", "x = 5.0"),
        ("x=5", "5"),
        ("90", "90^\\circ"),
        ("90^{\\circ}", "90"),
        ("5", "5\\text{ cm}"),
        ("5", "5\\,\\mathrm{cm}^2"),
        ("6.02\\times10^{23}", "6.02e23"),
        ("6.02\\cdot10^{23}", "602\\times10^{21}"),
        ("1000000", "10^6"),
    ],
)
def test_the_same_number_written_otherwise(gold: str, prediction: str) -> None:
    assert equivalent(prediction, gold) is True
    assert equivalent(gold, prediction) is True


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        ("4", "14"),
        ("4", "40"),
        ("12", "1,2"),
        ("123", "0,123"),
        ("123456", "1,23,456"),
        ("8", "\u22128"),
        ("3/8", "3"),
        ("3", "3 2/5"),
        ("9", "5 9/4"),
        ("-0.5", "-1 1/2"),
        ("3", "4\\frac{-2}{2}"),
        ("6", "7 2/-2"),
        ("6", "6\\sqrt{3}"),
        ("6", "6\\sqrt(3)"),
        ("(7,325,0,800)", "7325000800"),
        ("5", "x=6"),
        ("5", "5=5"),
        ("2", "x \\in \\{1,2\\}"),
        ("50", "50\\%"),
        ("0.5", "50\\%"),
        ("90", "80^\\circ"),
        ("5", "5\\text{ million}"),
        ("5", "5\\text{ or 6}"),
        ("3.0\\times10^{-12}", "5.0\\times10^{-12}"),
        ("6.02\\times 10^{23}", "6.02\\times10^{22}"),
        ("0.3333", "1/3"),
        ("0.1000000000000000000001", "0.1"),
        ("2\\pi", "6.28"),
        ("1", "1/0"),
        ("1", "\\frac{1}{0}"),
        ("1", "\u0661"),
        ("7", "seven"),
        ("7", ""),
        ("\\sqrt{2}", ""),
        ("7", "9" * 5000),
        ("7", "1e999999999"),
        ("7", "__import__('os').getpid()"),
    ],
)
def test_a_different_answer_is_wrong(gold: str, prediction: str) -> None:
    assert equivalent(prediction, gold) is False


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        ("\\dfrac{\\sqrt{3}}{2}", "\\frac{\\sqrt{3}}{2}"),
        ("\\dfrac{\\sqrt{3}}{2}", "\\tfrac{\\sqrt3}{2}"),
        ("\\dfrac{\\sqrt{3}}{2}", "\\frac{\\sqrt{3}}2"),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"),
        ("(0,4)\\cup(4,10)", "(0,4) \\cup (4,10)"),
        ("1700!", "1700!"),
        ("10:30", "10:30"),
        ("\\text{Tuesday}", "Tuesday"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_the_same_text_up_to_its_dress(gold: str, prediction: str) -> None:
    assert equivalent(prediction, gold) is True


@pytest.mark.parametrize(
    ("gold", "prediction"),
    [
        ("\\sqrt{12}", "2\\sqrt{3}"),
        ("(3,8)", "(8,3)"),
        ("k = 5, 6", "k = 4, 7"),
        ("10:30", "11:30"),
        ("2 x", "2 y"),
        ("x", "X"),
        ("1 2x", "12x"),
        ("\\frac{1}{1700!}", "\\frac{1}{1701!}"),
    ],
)
def test_two_different_texts_are_undecided(gold: str, prediction: str) -> None:
    assert equivalent(prediction, gold) is None
    verdict = grade(f"\\boxed{{{prediction}}}", gold)
    assert (verdict.value, verdict.status) == (None, ScoreStatus.FAILED)
    assert "neither is a plain number" in verdict.detail


@pytest.mark.parametrize(
    ("gold", "completion", "value"),
    [
        ("14250", "So the total is \\boxed{14,250}.", 1.0),
        ("42", "First \\boxed{42}. Then the answer: \\boxed{7}", 0.0),
        ("2 + 70 = 72\n#### 72", "\\boxed{72}", 1.0),
        ("It costs\n#### 1,234", "\\boxed{1234}", 1.0),
        ("It falls to minus 9.\n#### -9", "\\boxed{-9}", 1.0),
        ("It falls to minus 9.\n#### -9", "#### -9", 1.0),
        ("It falls to minus 9.\n#### -9", "#### 9", 0.0),
        ("... the larger root, so \\boxed 6.", "\\boxed{6}", 1.0),
        ("36", "30+6=36\n#### 36\n" + "This is consistent. " * 100, 1.0),
        ("36", "#### 36\nNo: \\boxed{37}", 0.0),
        ("36", "<think>#### 36</think> I do not know", 0.0),
        ("yes", "#### Step 1\nI think so", 0.0),
        ("7", "<think>maybe \\boxed{7}</think> The answer is \\boxed{9}.", 0.0),
        ("7", "<think>so far \\boxed{7}, but let me check", 0.0),
        ("5", "I will mark my answer with \\boxed", 0.0),
        ("5", "\\boxed{}", 0.0),
        ("4", "It is five.", 0.0),
        ("see the figure above", "anything", 0.0),
    ],
)
def test_a_completion_is_paid_for_its_final_answer(gold: str, completion: str, value: float) -> None:
    verdict = grade(completion, gold)
    assert (verdict.value, verdict.status) == (value, ScoreStatus.OK)


@pytest.mark.parametrize("gold", ["", "   ", "It costs\n#### ", "\\boxed{}"])
def test_an_empty_gold_answer_is_an_error_in_the_data(gold: str) -> None:
    with pytest.raises(DataError, match="gold answer is empty"):
        grade("\\boxed{5}", gold)


@pytest.mark.parametrize(
    "answer",
    [
        "7^{7^{7^{7^7}}}",
        "(10^9)!",
        "10^{999999999999}",
        "(" * 500_000,
        "\\text{" * 100_000,
        " " * 500_000 + "x",
        "1" * 10**6,
    ],
    ids=["tower", "factorial", "power", "parentheses", "texts", "spaces", "digits"],
)
def test_a_hostile_answer_is_refused_fast(answer: str) -> None:
    started = time.process_time()
    assert grade(f"\\boxed{{{answer}}}", "3").value == 0.0
    assert time.process_time() - started < 1.5
