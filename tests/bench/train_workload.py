"""The workload that every contestant of train_throughput.py gets, and how a contestant takes steps when it is told to.

A contestant is a process: it loads, says READY, and for each line that it reads takes one optimiser step on the same
examples and prints what it took. So contestants take turns, and what else the machine does hits all alike.
"""

import json
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from towline.storage.records import Demonstration, Preference, Turn
from towline.trainer.conversation import ConversationTokenizer
from towline.trainer.packing import TokenSequence
from towline.trainer.token_examples import TokenExample, TokenPair

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
GSM8K = ROOT / ".." / "shared" / "data" / "gsm8k_train.jsonl"
THREADS = 2
NUM_EXAMPLES, NUM_PAIRS = 8, 4
"""Of one step."""
MAX_TOKENS = 1024
"""Of a micro-batch; TRL's default length of a packed row."""
LEARNING_RATE = 1e-5
ADAM_BETAS = (0.9, 0.999)
MAX_GRADIENT_NORM = 1.0
BETA = 0.1


def questions(data: Path, count: int) -> list[tuple[str, str]]:
    """Questions with worked solutions: drawn from GSM8K, or made up with the lengths of its own."""
    rng = random.Random(0)
    if data.exists():
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
        return [(row["question"], row["answer"]) for row in rng.sample(rows, count)]

    def sentences(num_words: float) -> str:
        return " ".join(
            rng.choice(["Anna", "has", "12", "apples", "and", "sells", "half", "of", "them", "for", "$3", "each."])
            for _ in range(max(8, round(num_words)))
        )

    # Words of a question and of a solution: log-normal, median and spread of GSM8K's.
    return [(sentences(rng.lognormvariate(3.8, 0.4)), sentences(rng.lognormvariate(3.9, 0.5))) for _ in range(count)]


def demonstrations(model: Path, data: Path) -> list[TokenExample]:
    tokenizer = ConversationTokenizer(model, chat=True)
    return [
        tokenizer.demonstration(
            Demonstration(row=row, turns=(Turn(role="user", content=asked), Turn(role="assistant", content=said)))
        )
        for row, (asked, said) in enumerate(questions(data, NUM_EXAMPLES))
    ]


def preferences(model: Path, data: Path) -> list[TokenPair]:
    """The wrong completion of a question is the solution of the next."""
    tokenizer = ConversationTokenizer(model, chat=True)
    rows = questions(data, NUM_PAIRS)
    return [
        tokenizer.preference(
            Preference(
                row=row,
                prompt=(Turn(role="user", content=asked),),
                chosen=said,
                rejected=rows[(row + 1) % len(rows)][1],
                margin=None,
            )
        )
        for row, (asked, said) in enumerate(rows)
    ]


def num_tokens(sequences: Sequence[TokenSequence]) -> int:
    """Of prompts and completions as the data has them: padding is not counted, and a pair's prompt twice."""
    return sum(len(sequence.token_ids) for sequence in sequences)


def both(pairs: Sequence[TokenPair]) -> list[TokenSequence]:
    return [sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)]


def labels(example: TokenExample) -> list[int]:
    """Token ids where they are learned, -100 elsewhere."""
    ids = example.tokens.token_ids.copy()
    ids[: example.tokens.num_prompt_tokens] = -100
    ids[example.tokens.num_prompt_tokens :][~example.trained] = -100
    return ids.tolist()


class Turns:
    """Steps when the parent says so; `began` and `ended` around what is timed."""

    def __init__(self) -> None:
        print("READY", flush=True)

    def wait(self) -> None:
        sys.stdin.readline()
        self._began = time.perf_counter(), time.process_time()

    def ended(self, loss: float) -> None:
        wall, cpu = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print("STEP " + json.dumps({"wall": wall, "cpu": cpu, "peak_gib": peak, "loss": loss}), flush=True)


def take_turns(steps: int, take_step: Callable[[int], float]) -> None:
    """
    Args:
        take_step: of a number, returns the loss.
    """
    turns = Turns()
    for step in range(steps):
        turns.wait()
        turns.ended(take_step(step))


def all_trained(sequence: TokenSequence) -> np.ndarray:
    return np.ones(len(sequence.token_ids) - sequence.num_prompt_tokens, dtype=np.bool_)
