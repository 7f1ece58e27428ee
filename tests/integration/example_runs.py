"""Small runs of what learns from given examples: demonstrations and pairs of a task, and their experiments."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from integration.runs import MODEL, ROOT

SORT = ROOT / "data" / "sort"
STEPS_PER_EPOCH, BATCH = 4, 48
"""So many that a step takes some tenths of a second: long enough to be hit."""
HELD_OUT = 12
OBJECTIVES = {
    "sft": 'label_smoothing = 0.1\nschedule = "cosine"\nzero_stage = 2',
    "dpo": 'beta = 0.5\nschedule = "linear"\nzero_stage = 3',
    "reward_model": 'centring = 0.01\nschedule = "constant"\nzero_stage = 0',
}
"""Settings of `[trainer]` in which they differ."""
_EXPERIMENT = """
objective = "{objective}"
steps = 12
deterministic = true
policy = {{ model = "{model}" }}
data = {{ train = "{folder}/train.jsonl", chat = false }}

[trainer]
{settings}
batch_size = {batch}
learning_rate = 1e-4
warmup_steps = 2
max_tokens_per_microbatch = 64
max_grad_norm = 0.5
precision = "float32"
checkpoint_every = 3

[evaluation]
every = 4
data = {{ train = "{folder}/held_out.jsonl", chat = false }}

[local]
trainer_ranks = 2
"""


def write_experiment(folder: Path, objective: str) -> Path:
    """Of three epochs, with its data beside it."""
    for name, number in (("train", STEPS_PER_EPOCH * BATCH), ("held_out", HELD_OUT)):
        questions = [json.loads(line) for line in (SORT / f"{name}.jsonl").read_text().splitlines()[:number]]
        _write(folder / f"{name}.jsonl", map(_demonstration if objective == "sft" else _preference, questions))
    path = folder / f"{objective}.toml"
    settings = {"objective": objective, "settings": OBJECTIVES[objective], "batch": BATCH}
    path.write_text(_EXPERIMENT.format(model=MODEL, folder=folder, **settings))
    return path


def _demonstration(row: dict[str, str]) -> dict[str, str]:
    return {"prompt": f"sort:{row['question']}=", "completion": _boxed(row["answer"])}


def _preference(row: dict[str, str]) -> dict[str, str]:
    """The answer, and its digits the other way round: wrong unless they are all the same."""
    right, wrong = row["answer"], row["answer"][::-1]
    return {"prompt": f"sort:{row['question']}=", "chosen": _boxed(right), "rejected": _boxed(wrong)}


def _boxed(answer: str) -> str:
    return f"\\boxed{{{answer}}}"


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
