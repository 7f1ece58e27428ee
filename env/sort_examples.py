"""The sorting task as examples to learn from: right solutions, and pairs of a right and a wrong one."""

import json
import random
from pathlib import Path

from publish_folder import published_folder
from tasks import Example, splits
from tiny_lessons import SORT


def make_demonstrations(destination: Path) -> None:
    """Write `train.jsonl` and `held_out.jsonl`, rows of prompt and completion."""
    _write(destination, lambda example, rng: {"prompt": SORT.prompt(example), "completion": SORT.completion(example)})


def make_pairs(destination: Path) -> None:
    """The same with rows of prompt, chosen and rejected; what is rejected has the right digits in a wrong order."""
    _write(destination, _pair)


def make_steps(destination: Path) -> None:
    """The same with rows of prompt, steps and labels: digits one by one, each right where it belongs there."""
    _write(destination, _judged)


def _judged(example: Example, rng: random.Random) -> dict[str, object]:
    digits = list(example.answer)
    if rng.random() < 0.5:
        rng.shuffle(digits)
    labels = [int(digit == right) for digit, right in zip(digits, example.answer, strict=True)]
    return {"prompt": SORT.prompt(example), "steps": digits, "labels": labels}


def _pair(example: Example, rng: random.Random) -> dict[str, str] | None:
    """None for a number whose digits are all the same: there is no wrong order."""
    if len(set(example.answer)) == 1:
        return None
    digits = list(example.answer)
    while "".join(digits) == example.answer:
        rng.shuffle(digits)
    return {
        "prompt": SORT.prompt(example),
        "chosen": SORT.completion(example),
        "rejected": SORT.completion(Example(example.question, "".join(digits))),
    }


def _write(destination: Path, row_of) -> None:
    rng = random.Random(destination.name)
    examples = splits("sort")
    with published_folder(destination) as folder:
        for split in ("train", "held_out"):
            rows = (row_of(example, rng) for example in examples[split])
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row is not None))
