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


def test_a_refusal_says_why() -> None:
    assert grade(r"\boxed{1} and \boxed{2}", "").detail == "2 boxed answers where one belongs"
    assert grade("<think>hm", "").detail == "the thinking is not closed"
