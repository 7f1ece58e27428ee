import pytest

from towline.rollout.rewards.format import grade


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        (r"The answer is \boxed{9}.", 1.0),
        (r"<think>maybe \boxed{7}</think> The answer is \boxed{9}.", 1.0),
        (r"<think></think>\boxed{4}", 1.0),
        (r"\boxed{\frac{1}{2}}", 1.0),
        ("It is five.", 0.0),
        (r"\boxed 6", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{6", 0.0),
        (r"\boxed{1} and \boxed{2}", 0.0),
        (r"<think>so far \boxed{7}, but let me check", 0.0),
        (r"<think>\boxed{7}</think> done", 0.0),
        (r"<think>\boxed{7}</think>", 0.0),
        (r"<think>a</think>\boxed{4}<think>", 0.0),
        (r"<think>a</think>\boxed{4}</think>", 0.0),
        (r"<think>a<think>b</think></think>\boxed{4}", 0.0),
        (r"\boxed{4}<think>a</think>\boxed{4}", 0.0),
        (r"<think>a</think>\boxed{\boxed{4}}", 1.0),
        (r"<think>a</think>\boxed{4", 0.0),
        (r"Put your final answer within \boxed{}.", 0.0),
        (r"<think>a</think>I would box it with \boxed", 0.0),
        (r"\boxed{7} <think>was that right?</think>", 0.0),
        (r"\boxed{7} <think>yes</think> \boxed{7}", 0.0),
        (r"<think>a</think><think>b</think>\boxed{4}", 0.0),
        (r"<think><think>a</think>\boxed{4}", 0.0),
        (r"</think><think>\boxed{4}", 0.0),
        (r"</think><think>a</think>\boxed{4}", 0.0),
        (r"<think>a</think>b</think>\boxed{4}", 0.0),
        (r"a</think>\boxed{4}", 0.0),
        ("", 0.0),
    ],
)
def test_one_closed_box_after_closed_thinking_is_paid(completion: str, value: float) -> None:
    assert grade(completion, "").value == value


CASES = {
    "G1-42": [
        (r"<think>maybe \boxed{7}</think> The answer is \boxed{9}.", 1),
        (r"<think>maybe \boxed{9}</think> The answer is \boxed{7}.", 1),
    ],
    "G1-43": [(r"<think>so far \boxed{7}, but let me check", 0)],
    "G1-46": [
        (r"<think>a</think><think>b</think>\boxed{4}", 0),
        (r"<think><think>a</think>\boxed{4}", 0),
        (r"</think><think>\boxed{4}", 0),
        (r"<think></think>\boxed{4}", 1),
    ],
    "G1-47": [("It is five.", 0)],
}
"""The prompt of G1-47 holds a box: a reward never sees it."""


@pytest.mark.parametrize("case", CASES)
def test_the_form_of_the_cases(case: str) -> None:
    for completion, expected in CASES[case]:
        assert grade(completion, "4").value == expected, completion


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece", ["<think>", "</think>", r"\boxed{", r"\boxed{a}", "{", "}", "\\", r"<think>\boxed{</think>", "\ud800"]
)
def test_a_megabyte_of_anything_is_soon_judged(piece: str) -> None:
    assert grade(piece * (1_000_000 // len(piece)), "4").value == 0.0


def test_a_refusal_says_why() -> None:
    assert grade(r"\boxed{1} and \boxed{2}", "").detail == "2 boxed answers where one belongs"
    assert grade("<think>hm", "").detail == "the thinking is not closed"
