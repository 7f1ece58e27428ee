"""Gold answers of coding tasks: each form, and what is none."""

import json

import pytest

from towline.rollout.rewards.code_gold import FunctionTests, StdioCases, read_gold
from towline.storage.errors import DataError


def test_a_list_is_tests() -> None:
    assert read_gold('["assert f(1) == 2", "assert f(2) == 3"]') == FunctionTests(
        tests=("assert f(1) == 2", "assert f(2) == 3")
    )


def test_an_object_may_have_a_setup_and_entry_points() -> None:
    gold = {"tests": ["assert f(A) == 2"], "setup": "A = 1", "entry_points": ["f", "g"]}
    assert read_gold(json.dumps(gold)) == FunctionTests(
        tests=("assert f(A) == 2",), setup="A = 1", entry_points=("f", "g")
    )
    assert read_gold('{"tests": ["assert f()"]}') == FunctionTests(tests=("assert f()",))


def test_rows_of_mbpp_are_tests() -> None:
    row = {
        "task_id": 2,
        "text": "Write a function.",
        "code": "def f(x): return x",
        "test_list": ["assert f(1) == 1", "assert f(2) == 2"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    found = read_gold(json.dumps(row))
    assert isinstance(found, FunctionTests)
    assert (found.tests, found.setup.strip()) == (("assert f(1) == 1", "assert f(2) == 2"), "")
    assert (found.entry_points, found.prompt) == ((), "")


def test_rows_of_sanitised_mbpp_import_first() -> None:
    row = {
        "source_file": "a.py",
        "task_id": 3,
        "prompt": "Write a function.",
        "code": "",
        "test_imports": ["import math", "from collections import Counter"],
        "test_list": ["assert f(1) == math.pi"],
    }
    found = read_gold(json.dumps(row))
    assert isinstance(found, FunctionTests)
    assert found.setup.split("\n")[:2] == ["import math", "from collections import Counter"]
    assert read_gold(json.dumps(row | {"test_imports": []})) == read_gold(json.dumps(row | {"test_imports": None}))


def test_rows_of_humaneval_go_on_from_their_prompt() -> None:
    row = {
        "task_id": "HumanEval/0",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "canonical_solution": "    return x\n",
        "test": "def check(candidate):\n    assert candidate(1) == 1\n",
    }
    found = read_gold(json.dumps(row))
    assert isinstance(found, FunctionTests)
    assert found == FunctionTests(
        tests=(f"{row['test']}\n\ncheck(f)\n",), setup="def f(x):\n", entry_points=("f",), prompt="def f(x):\n"
    )


def test_inputs_and_outputs_are_cases() -> None:
    assert read_gold('{"inputs": ["1\\n", ""], "outputs": ["2\\n", "0\\n"]}') == StdioCases(
        cases=(("1\n", "2\n"), ("", "0\n"))
    )


@pytest.mark.parametrize(
    ("gold", "why"),
    [
        ("", "it is no JSON"),
        ("assert f(1) == 2", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("null", "neither a list nor an object"),
        ("4", "neither a list nor an object"),
        ('"assert f(1) == 2"', "neither a list nor an object"),
        ("[]", "tests is not a list of one or more strings"),
        ("[1]", "tests is not a list of one or more strings"),
        ('["assert f()", null]', "tests is not a list of one or more strings"),
        ("{}", "none of tests, test_list"),
        ('{"test": "def check(f): pass"}', "none of tests, test_list"),
        ('{"inputs": ["1"]}', "none of tests, test_list"),
        ('{"tests": []}', "tests is not a list"),
        ('{"tests": "assert f()"}', "tests is not a list"),
        ('{"tests": {"0": "assert f()"}}', "tests is not a list"),
        ('{"tests": ["assert f()"], "setup": ["import math"]}', "setup is no string"),
        ('{"tests": ["assert f()"], "setup": null}', "setup is no string"),
        ('{"tests": ["assert f()"], "entry_points": "f"}', "entry_points is not a list"),
        ('{"tests": ["assert f()"], "entry_points": []}', "entry_points is not a list"),
        ('{"tests": ["assert f()"], "set_up": ""}', "set_up is not a field"),
        ('{"test_list": []}', "test_list is not a list"),
        ('{"test_list": ["assert f()"], "test_setup_code": 1}', "test_setup_code is no string"),
        ('{"test_list": ["assert f()"], "test_imports": "import math"}', "test_imports is not a list"),
        ('{"test_list": ["assert f()"], "answer": "4"}', "answer is not a field"),
        ('{"test": "x", "entry_point": "f(", "prompt": ""}', "entry_point 'f(' is no name"),
        ('{"test": "x", "entry_point": "", "prompt": ""}', "entry_point '' is no name"),
        ('{"test": ["x"], "entry_point": "f"}', "test is no string"),
        ('{"test": "x", "entry_point": "f", "prompt": 1}', "prompt is no string"),
        ('{"test": "x", "entry_point": "f", "answer": 1}', "answer is not a field"),
        ('{"inputs": [], "outputs": []}', "inputs is not a list"),
        ('{"inputs": ["1"], "outputs": []}', "outputs is not a list"),
        ('{"inputs": ["1", "2"], "outputs": ["1"]}', "it has 2 inputs and 1 outputs"),
        ('{"inputs": ["1"], "outputs": [1]}', "outputs is not a list"),
        ('{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}', "fn_name is not a field"),
    ],
)
def test_anything_else_is_an_error_that_says_why(gold: str, why: str) -> None:
    with pytest.raises(DataError, match=r"docs/rewards\.md lists the forms") as error:
        read_gold(gold)
    assert why in str(error.value)
    assert len(str(error.value)) < 800
