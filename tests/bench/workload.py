"""The one workload that every contestant of grpo_step.py gets: prompts, reward, lengths, precision."""

import json
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
PROMPTS_PER_STEP = 2
GROUP_SIZE = 8
MAX_COMPLETION_TOKENS = 64
LEARNING_RATE = 1e-5
THREADS = 2


EXAMPLES = {"short": 0, "200": 13}
"""Case -> worked examples before each question: 38 tokens a prompt with SmolLM2's chat template, or 205 to 207."""
CONTEXT_TOKENS = 320


def questions(case: str, count: int = 64) -> list[tuple[str, str]]:
    """No two prompts begin alike beyond the chat template, so that no engine computes one's beginning for another."""
    return [
        (
            "".join(f"{a}+{a + 1}={2 * a + 1}. " for a in range(number + 101, number + 101 + EXAMPLES[case]))
            + f"What is {number}+{number + 1}?",
            str(2 * number + 1),
        )
        for number in range(count)
    ]


def contains_answer(completion: str, gold: str) -> float:
    return float(gold in completion)


def write_data(folder: Path, case: str) -> Path:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": q, "answer": a}) + "\n" for q, a in questions(case)))
    return path


def float32_copy(folder: Path) -> Path:
    """The model in float32: what a folder says its dtype is, a peer's engine uses."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = folder / "model"
    AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).save_pretrained(target)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(target)
    return target


def report(seconds: list[float], tokens: list[int], peak_gib: dict[str, float]) -> None:
    """Print what a contestant measured, first step left out, as the one JSON line that grpo_step.py reads."""
    steady = slice(1, None)
    print(
        "RESULT "
        + json.dumps(
            {
                "seconds": sum(seconds[steady]) / len(seconds[steady]),
                "tokens_per_s": sum(tokens[steady]) / sum(seconds[steady]),
                "peak_gib": peak_gib,
            }
        ),
        flush=True,
    )


def now() -> float:
    return time.perf_counter()
