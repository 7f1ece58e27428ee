"""The three tasks of the demonstrations, as seeded generators of questions with their answers.

`last-number` is for SmolLM2-135M, `sort` and `code` for the small models of tiny_lessons.py. All are rules that a model
can learn in minutes on a CPU and that a grader checks exactly; none says anything about reasoning.
"""

import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from publish_folder import published_folder

SORT_DIGITS = 5
CODE_FUNCTIONS: dict[str, Callable[[int], int]] = {
    "x+1": lambda x: x + 1,
    "x+2": lambda x: x + 2,
    "x+3": lambda x: x + 3,
    "x-1": lambda x: x - 1,
    "x-2": lambda x: x - 2,
    "x-3": lambda x: x - 3,
    "x*2": lambda x: x * 2,
    "x*3": lambda x: x * 3,
}
"""Two examples tell any two of them apart."""
CODE_INPUTS = range(1, 13)
"""Of the examples in the questions."""
CODE_OTHER_INPUTS = (*range(-20, 1), *range(13, 61))
"""Of the tests: what a program answers there stands in no question."""
CODE_NUM_TESTS = 3
SHOT = "What is the last number: 26, 13, 88, 59?"
"""The solved example inside prompts/last_number.txt, kept out of the data."""


@dataclass(frozen=True)
class Example:
    question: str
    answer: str


@dataclass(frozen=True)
class CodeExample(Example):
    """The question is the beginning of a function, the answer an expression that completes it."""

    tests: dict[str, str]
    """In the form of HumanEval."""


class Task(NamedTuple):
    draw: Callable[[random.Random], Example]
    split_sizes: dict[str, int]
    reserved: frozenset[str] = frozenset()


def draw_last_number(rng: random.Random) -> Example:
    numbers = [str(n) for n in rng.sample(range(10, 100), rng.randint(3, 5))]
    return Example(f"What is the last number: {', '.join(numbers)}?", numbers[-1])


def draw_sort(rng: random.Random) -> Example:
    digits = [str(rng.randint(0, 9)) for _ in range(SORT_DIGITS)]
    return Example("".join(digits), "".join(sorted(digits)))


def draw_code(rng: random.Random) -> CodeExample:
    expression, function = rng.choice([*CODE_FUNCTIONS.items()])
    shown = rng.sample([x for x in CODE_INPUTS if function(x) >= 0], 2)
    question = f"# {', '.join(f'f({x}) = {function(x)}' for x in shown)}\ndef f(x):\n    return"
    tested = rng.sample(CODE_OTHER_INPUTS, CODE_NUM_TESTS)
    test = "".join(["def check(candidate):\n", *(f"    assert candidate({x}) == {function(x)}\n" for x in tested)])
    return CodeExample(question, expression, {"prompt": question, "test": test, "entry_point": "f"})


# `sft_dev` is what tiny_model.py watches while it trains; it is not written to disk.
TASKS = {
    "last-number": Task(draw_last_number, {"held_out": 200, "train": 4000}, frozenset({SHOT})),
    "sort": Task(draw_sort, {"held_out": 400, "train": 4000, "sft_dev": 400}),
    "code": Task(draw_code, {"held_out": 200, "train": 200, "sft_dev": 200}),
}


def splits(name: str, seed: int = 0) -> dict[str, list[Example]]:
    """Every split of a task, cut from one stream of distinct questions, so no two of them share one."""
    task = TASKS[name]
    rng = random.Random(f"{name}/{seed}")
    seen = set(task.reserved)
    return {split: [_draw_new(task, rng, seen) for _ in range(size)] for split, size in task.split_sizes.items()}


def _draw_new(task: Task, rng: random.Random, seen: set[str]) -> Example:
    while (example := task.draw(rng)).question in seen:
        pass
    seen.add(example.question)
    return example


def make_task(name: str, destination: Path) -> None:
    """Write `train.jsonl` and `held_out.jsonl`, rows of question, answer and, of code, tests."""
    with published_folder(destination) as folder:
        for split, examples in splits(name).items():
            if split != "sft_dev":
                rows = (json.dumps(asdict(example)) + "\n" for example in examples)
                (folder / f"{split}.jsonl").write_text("".join(rows))
