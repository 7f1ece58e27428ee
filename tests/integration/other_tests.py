"""The held-out functions of the coding task, judged by other tests than those that are trained on, and more of them."""

import json
from dataclasses import replace
from pathlib import Path

from towline.jobs.work import EVALUATION_CHUNK_PROMPTS, Workload
from towline.storage.data_config import DataConfig
from towline.storage.datasets import load_prompts
from towline.storage.records import Prompt

HELD_OUT = Path(__file__).parents[2] / "data" / "code" / "held_out.jsonl"


def held_out_programs(training: Workload) -> Workload:
    """One completion a function, at the temperature and with the reward of training."""
    data = load_prompts(DataConfig(train=str(HELD_OUT), fields={"prompt": "question"}, chat=training.chat))
    return replace(
        training,
        name="held_out",
        data=replace(data, prompts=tuple(replace(prompt, answer=_tests(prompt)) for prompt in data.prompts)),
        group_size=1,
        chunk_prompts=EVALUATION_CHUNK_PROMPTS,
        schedule=None,
    )


def _tests(prompt: Prompt) -> str:
    test = f"def check(candidate):\n    for x in range(-50, 51, 10):\n        assert candidate(x) == {prompt.answer}\n"
    return json.dumps({"prompt": prompt.text, "test": test, "entry_point": "f"})
