"""Which part of a completion is run."""

import pytest

from towline.rollout.rewards.code_block import program

CODE = "def f(x):\n    return x\n"
OTHER = "def f(x):\n    return 0\n"


def block(code: str, language: str = "python") -> str:
    return f"```{language}\n{code}```\n"


@pytest.mark.parametrize(
    ("completion", "found"),
    [
        (CODE, CODE),
        (block(CODE), CODE),
        (block(CODE, ""), CODE),
        (block(CODE, "py"), CODE),
        (block(CODE, "Python"), CODE),
        (block(CODE, "python3"), CODE),
        (f"Here it is:\n\n{block(CODE)}\nIt returns `x`.", CODE),
        (f"Here it is:\r\n\r\n```python\r\n{CODE}```\r\n", CODE),
        (f"   ```python\n{CODE}   ```", CODE),
        # The last block counts.
        (block(OTHER) + "or rather\n" + block(CODE), CODE),
        (block(CODE) + "or rather\n" + block(OTHER), OTHER),
        # Blocks of other languages are examples.
        (block(CODE) + block("pip install f\n", "bash"), CODE),
        (block(CODE) + block("f(1) -> 1\n", "text"), CODE),
        (block("let f = x => x\n", "javascript"), ""),
        (block('{"f": 1}\n', "json") + block(CODE), CODE),
        # A block that is not closed is not done.
        (f"```python\n{CODE}", ""),
        (block(OTHER) + f"```python\n{CODE}", OTHER),
        (f"```python\n{OTHER}Wait.\n" + block(CODE), CODE),
        # Thinking is not the answer.
        (f"<think>{block(OTHER)}</think>{block(CODE)}", CODE),
        (f"{block(OTHER)}</think>{block(CODE)}", CODE),
        (f"<think>{block(OTHER)}</think>{CODE}", CODE),
        (f"<think>{block(CODE)}</think>", ""),
        (f"<think>{block(CODE)}", ""),
        # There is nothing.
        ("", ""),
        (" \n\t\n", ""),
        (block(""), ""),
        (block("\n\n"), ""),
        # What a line of the program looks like is none of our business.
        (block('x = """\n` `` ```` `\n"""\n'), 'x = """\n` `` ```` `\n"""\n'),
        ("`x = 1`", "`x = 1`"),
    ],
)
def test_the_program_is_the_last_closed_block_of_python(completion: str, found: str) -> None:
    # Indentation before fences belongs to the text around.
    assert program(completion).rstrip(" ") == found


PROMPT = 'import math\n\ndef f(x):\n    """The same."""\n'


@pytest.mark.parametrize(
    "completion",
    [
        "    return x\n",
        "    return x\n\n\ndef main():\n    f(1)\n",
        "    return x\nprint(f(1))\n",
        "    return x\n\n# Test\nassert f(1) == 2\n",
        "    return x\n\nif __name__ == '__main__':\n    raise SystemExit\n",
        "    return x\nThis function returns x.",
        "    return x\n\n\nclass Other:\n    pass\n",
        "\n    return x\n",
        "    if x:\n        return x\n\n    return x\ndef g(): (",
    ],
)
def test_text_goes_on_from_the_prompt_as_far_as_it_is_indented(completion: str) -> None:
    space: dict[str, object] = {}
    exec(program(completion, PROMPT, "f"), space)
    assert space["f"](3) == 3  # type: ignore[operator]
    assert not {"main", "Other", "g"} & space.keys()


def test_text_may_define_the_function_again() -> None:
    assert program(CODE, PROMPT, "f") == f"{PROMPT}\n\n{CODE}"
    assert program("class f:\n    pass\n", PROMPT, "f") == f"{PROMPT}\n\nclass f:\n    pass\n"
    assert program("async def  f(x): ...\n", PROMPT, "f") == f"{PROMPT}\n\nasync def  f(x): ...\n"


def test_a_block_with_the_function_stands_after_the_prompt() -> None:
    """Imports and helpers of the prompt are there for it."""
    space: dict[str, object] = {}
    exec(program(block("def f(x):\n    return math.floor(x)\n"), PROMPT, "f"), space)
    assert space["f"](3.5) == 3  # type: ignore[operator]


def test_a_block_without_the_function_goes_on_from_the_prompt() -> None:
    space: dict[str, object] = {}
    exec(program(block("    return x\n"), PROMPT, "f"), space)
    assert space["f"](3) == 3  # type: ignore[operator]


def test_a_function_with_a_longer_name_is_another() -> None:
    assert program("    return x\ndef fast(x): return 0\n", PROMPT, "f") == f"{PROMPT}    return x\n"


def test_no_code_is_no_program_whatever_the_prompt() -> None:
    for completion in ("", " \n", block(""), "<think>    return x\n", f"```python\n{CODE}"):
        assert program(completion, PROMPT, "f") == ""


def test_many_fences_take_linear_time() -> None:
    assert program("```\n" * 200_000) == ""
    assert program("```python\n" * 100_000 + "x = 1\n```") == "x = 1\n"
    assert program("`" * 1_000_000) == "`" * 1_000_000
