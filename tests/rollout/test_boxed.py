import time

import pytest

from towline.rollout.rewards.boxed import boxed_answer, last_boxed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"So \boxed{42}.", "42"),
        (r"First \boxed{7}. Then the answer: \boxed{42}", "42"),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\}}", r"\}"),
        (r"\boxed {6}", "6"),
        (r"\fbox{6}", "6"),
        (r"\boxed{}", ""),
        (r"so \boxed 6.", "6"),
        (r"\boxed -2.5, say", "-2.5"),
        (r"\boxed{5}. As I was told to use \boxed", "5"),
        (r"\boxed{5}, in the \boxed form", "5"),
        (r"\boxedanswer{5}", None),
        (r"I will mark my answer with \boxed", None),
        (r"Use \boxed{", None),
        (r"\boxed{\frac{\sqrt{3}}{2}", None),
        (r"\boxed{7} or rather \boxed{8", None),
        ("no box at all", None),
        ("", None),
    ],
)
def test_content_of_the_last_box(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"<think>maybe \boxed{7}</think> The answer is \boxed{9}.", "9"),
        (r"<think>maybe \boxed{7}</think> The answer is nine.", None),
        (r"so far \boxed{7}</think> I give up", None),
        (r"<think>so far \boxed{7}, but let me check", None),
        (r"\boxed{7} <think>wait", None),
        (r"<think>a</think>\boxed{4}<think>hm", None),
        (r"<think>a</think><think>b</think>\boxed{4}", "4"),
        (r"<think></think>\boxed{4}", "4"),
    ],
)
def test_only_what_follows_the_thinking_is_an_answer(text: str, expected: str | None) -> None:
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" + "{" * 1_000_000,
        "\\boxed{" * 150_000,
        "\\boxed{" * 70_000 + "}" * 70_000,
        "\\boxed" + " " * 1_000_000,
        "\\boxed " + "1,111" * 200_000,
        "<think>" * 150_000 + "\\boxed{1}",
        "</think>\\boxed{1}" * 60_000,
        "\\" * 1_000_000,
    ],
    ids=["braces", "openings", "nested", "spaces", "digits", "thinks", "ends", "backslashes"],
)
def test_a_hostile_megabyte_takes_linear_time(text: str) -> None:
    started = time.process_time()
    last_boxed(text)
    assert time.process_time() - started < 1.5  # quadratic time would be minutes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"The roots are \boxed{2}, \boxed{9}, \boxed{11}.", "2, 9, 11"),
        (r"\boxed{2} and \boxed{9}", "2, 9"),
        (r"$\boxed{2}$, and $\boxed{9}$", "2, 9"),
        (r"\boxed{2} or \boxed{9}", "2, 9"),
        (r"\boxed{2} \boxed{9}", "9"),
        (r"First \boxed{7}. Then \boxed{9}, \boxed{11}", "9, 11"),
        (r"\boxed{2}, hence \boxed{9}", "9"),
        (r"<think>\boxed{2}, </think>\boxed{9}", "9"),
        (r"\boxed{2}, \boxed{9", None),
        (r"\boxed{2", None),
        (r"none", None),
    ],
)
def test_boxes_with_nothing_but_separators_between_them_are_one_list(text: str, expected: str | None) -> None:
    """G1-22"""
    assert boxed_answer(text) == expected


def test_of_very_many_boxes_only_the_last_are_a_list() -> None:
    assert boxed_answer(", ".join([r"\boxed{1}"] * 100_000)) == ", ".join(["1"] * 21)
