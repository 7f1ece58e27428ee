"""HumanEval through the reward: every solution passes, every mutant of one fails, and no trick pays."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest

import humaneval
from humaneval import Row, chosen_wrong_solutions, plainly, solution, wrong_solutions
from towline.rollout.rewards.code_tests import CodeTests
from towline.rollout.rewards.verdict import Verdict
from towline.rollout.sandbox.limits import Limits

pytestmark = pytest.mark.slow
GRADE = CodeTests(limits=Limits(seconds=20.0))
"""A solution takes a fraction of a second; machines of tests are busy."""


@pytest.fixture(scope="module")
def tasks() -> list[Row]:
    if not humaneval.DATA.exists():
        pytest.skip("../shared/data/humaneval.jsonl is not here")
    found = humaneval.rows()
    assert len(found) == 164
    return found


def verdicts(pairs: list[tuple[Row, str]]) -> dict[str, Verdict]:
    """By task."""
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda pair: GRADE(pair[1], json.dumps(pair[0])), pairs)
        return {row["task_id"]: verdict for (row, _), verdict in zip(pairs, found, strict=True)}


def block(code: str) -> str:
    return f"<think>Let me see.</think>Here it is:\n\n```python\n{code}\n```\n"


def test_all_solutions_pass_as_continuations_of_their_prompts(tasks: list[Row]) -> None:
    found = verdicts([(row, row["canonical_solution"]) for row in tasks])
    assert {task: verdict for task, verdict in found.items() if verdict != Verdict(value=1.0)} == {}


def test_all_solutions_pass_as_blocks(tasks: list[Row]) -> None:
    found = verdicts([(row, block(solution(row))) for row in tasks])
    assert {task: verdict for task, verdict in found.items() if verdict != Verdict(value=1.0)} == {}


def test_what_base_models_write_on_after_a_solution_does_no_harm(tasks: list[Row]) -> None:
    more = "\n\ndef main():\n    raise SystemExit(0)\n\nif __name__ == '__main__':\n    main()\n# Now another: def ("
    found = verdicts([(row, row["canonical_solution"] + more) for row in tasks[:40]])
    assert {task: verdict for task, verdict in found.items() if verdict != Verdict(value=1.0)} == {}


def test_every_mutant_is_wrong_in_plain_python_and_gets_nothing(tasks: list[Row]) -> None:
    mutants = chosen_wrong_solutions()
    ended = plainly([*mutants, *((row, solution(row)) for row in tasks)])
    assert ended[164:] == ["passed"] * 164
    assert len(ended[:164]) == 164
    assert {"passed", "TimeoutError"} & set(ended[:164]) == set()
    found = verdicts([(row, block(code)) for row, code in mutants])
    assert {task: verdict.value for task, verdict in found.items()} == {row["task_id"]: 0.0 for row in tasks}
    # Exceptions of solutions are named as they are without us.
    names = {row["task_id"]: name for (row, _), name in zip(mutants, ended[:164], strict=True)}
    assert len(set(names.values())) > 3
    assert {task: verdict for task, verdict in found.items() if names[task] not in verdict.detail} == {}


@pytest.mark.matrix
@pytest.mark.parametrize("number", range(4))
def test_other_mutants_get_what_plain_python_gives_them(tasks: list[Row], number: int) -> None:
    pairs = [(row, code) for row in tasks for code in islice(wrong_solutions(row), number, number + 1)]
    ended = dict(zip((row["task_id"] for row, _ in pairs), plainly(pairs), strict=True))
    pairs = [(row, code) for row, code in pairs if ended[row["task_id"]] != "TimeoutError"]
    found = verdicts([(row, block(code)) for row, code in pairs])
    expected = {row["task_id"]: float(ended[row["task_id"]] == "passed") for row, _ in pairs}
    assert {task: verdict.value for task, verdict in found.items()} == expected


EQUAL = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __lt__
    def __bool__(self): return True
    def __sub__(self, other): return self
    __add__ = __radd__ = __rsub__ = __mul__ = __truediv__ = __round__ = __abs__ = lambda self, *_: self
    def __len__(self): return 0
    def __iter__(self): return iter(())
    def __getitem__(self, key): return self
    def __float__(self): return 0.0
    def __hash__(self): return 0
"""


@pytest.mark.parametrize(
    "body",
    [
        "return Equal()",
        pytest.param("return None", marks=pytest.mark.slow),
        pytest.param("import os; os._exit(0)", marks=pytest.mark.slow),
        pytest.param("raise SystemExit(0)", marks=pytest.mark.slow),
    ],
)
def test_a_trick_pays_nothing(tasks: list[Row], body: str) -> None:
    found = verdicts(
        [(row, block(f"{EQUAL}\ndef {row['entry_point']}(*args, **kwargs):\n    {body}\n")) for row in tasks]
    )
    assert {task: verdict for task, verdict in found.items() if verdict.value != 0.0} == {}


def test_nothing_but_the_prompt_is_no_solution(tasks: list[Row]) -> None:
    found = verdicts([(row, "    pass\n") for row in tasks[::8]])
    assert {verdict.value for verdict in found.values()} == {0.0}
