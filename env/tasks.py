"""The two tasks of the demonstrations, as seeded generators of questions with their answers.

`last-number` is for SmolLM2-135M, `sort` for the small model of tiny_model.py. Both are rules that a model can learn
in minutes on a CPU and that a grader checks exactly; neither says anything about reasoning.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from publish_folder import published_folder

SORT_DIGITS = 5
SHOT = "What is the last number: 26, 13, 88, 59?"
"""The solved example inside prompts/last_number.txt, kept out of the data."""


class Example(NamedTuple):
    question: str
    answer: str


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


# `sft_dev` is what tiny_model.py watches while it trains; it is not written to disk.
TASKS = {
    "last-number": Task(draw_last_number, {"held_out": 200, "train": 4000}, frozenset({SHOT})),
    "sort": Task(draw_sort, {"held_out": 400, "train": 4000, "sft_dev": 400}),
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
    """Write `train.jsonl` and `held_out.jsonl`, rows of question and answer."""
    with published_folder(destination) as folder:
        for split, examples in splits(name).items():
            if split != "sft_dev":
                rows = (json.dumps(example._asdict()) + "\n" for example in examples)
                (folder / f"{split}.jsonl").write_text("".join(rows))
