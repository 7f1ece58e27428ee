"""The mathematical grader beside Math-Verify 0.9: verdicts a second, accuracy, and how long the slowest takes.

    python tests/bench/math_rewards.py [--check] [--pairs N]

Both get the same completions, half of them right and half with another question's answer, of MATH-500 and GSM8K in
equal parts, in one process and without limits of time. Accuracy is on the reported faults of graders (G1 of
tests/math_cases.py), for which Math-Verify keeps its own limits, as it needs them. --check exits 1 if a bar is missed.
"""

import argparse
import json
import logging
import random
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from math_verify import parse, verify

import math_cases
from towline.rollout.rewards.math_answer import equivalent, grade

GOLDS = Path(__file__).parents[1] / "golds" / "math_answers.json"
LIMIT_S = 5.0
"""What the scoring service gives a completion."""
BARS = {"math_verdicts": 5.0, "math_accuracy": 1.0, "math_worst": 1.0}

Pair = tuple[str, str]
"""Completion, gold answer."""


def mixed_pairs(count: int) -> list[tuple[Pair, bool]]:
    """Completions and whether they are right; a wrong one is the answer to another question."""
    rng = random.Random(0)
    golds = json.loads(GOLDS.read_text(encoding="utf-8"))
    pairs: list[tuple[Pair, bool]] = []
    for answers in (golds["math500"], golds["gsm8k_train"] + golds["gsm8k_test"]):
        for number in range(count // 2):
            gold = answers[number % len(answers)] if number < len(answers) else rng.choice(answers)
            is_right = number % 2 == 0
            answer = gold if is_right else rng.choice([other for other in rng.choices(answers, k=4) if other != gold])
            pairs.append(((f"So the answer is $\\boxed{{{answer}}}$.", gold), is_right))
    rng.shuffle(pairs)
    return pairs


def math_verify_grade(completion: str, gold: str) -> float:
    expected = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)
    return float(verify(expected, parse(completion, parsing_timeout=None), timeout_seconds=None))


def math_verify_equivalent(prediction: str, gold: str) -> bool:
    try:
        return verify(parse(f"\\boxed{{{gold}}}"), parse(f"\\boxed{{{prediction}}}"))
    except Exception:  # what it raises is its verdict here
        return False


def timed(judge: Callable[[str, str], object], pairs: Iterable[Pair]) -> tuple[list[object], list[float]]:
    verdicts: list[object] = []
    seconds: list[float] = []
    for completion, gold in pairs:
        began = time.perf_counter()
        verdicts.append(judge(completion, gold))
        seconds.append(time.perf_counter() - began)
    return verdicts, seconds


def row(name: str, seconds: list[float], agreement: str) -> str:
    ordered = sorted(seconds)
    p50, p99 = (1000 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    rate = len(ordered) / sum(ordered)
    return f"{name:34}{rate:10.0f}/s{p50:10.3f}{p99:10.3f}{1000 * ordered[-1]:10.1f}   {agreement}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 below a bar")
    parser.add_argument("--pairs", type=int, default=10_000)
    options = parser.parse_args()
    logging.disable(logging.WARNING)

    mixed = mixed_pairs(options.pairs)
    pairs, is_right = [pair for pair, _ in mixed], [is_right for _, is_right in mixed]
    for judge in (grade, math_verify_grade):
        judge(*pairs[0])  # imports and compiled patterns belong to no verdict
    ours, our_seconds = timed(lambda completion, gold: grade(completion, gold).value, pairs)
    theirs, their_seconds = timed(math_verify_grade, pairs)
    hostile = [(f"\\boxed{{{answer}}}", gold) for answer in math_cases.HOSTILE.values() for gold in ("3", "\\sqrt{2}")]
    of_hostile, hostile_seconds = timed(lambda completion, gold: grade(completion, gold).value, hostile)

    cases = [case for case in math_cases.PAIRS if case[0].startswith("G1-")]
    our_score = sum(equivalent(prediction, gold) is wanted for _, gold, prediction, wanted in cases)
    their_score = sum(math_verify_equivalent(prediction, gold) is wanted for _, gold, prediction, wanted in cases)

    def right(verdicts: list[object]) -> str:
        return f"{sum(verdict == wanted for verdict, wanted in zip(verdicts, is_right, strict=True))} as meant"

    print(f"{len(pairs)} pairs of MATH-500 and GSM8K, {sum(is_right)} right; {len(hostile)} hostile completions")
    print(f"{'':34}{'verdicts':>12}{'p50 ms':>10}{'p99 ms':>10}{'worst ms':>10}")
    print(row("math_answer", our_seconds, right(ours)))
    print(row("Math-Verify 0.9", their_seconds, right(theirs)))
    print(row("math_answer, hostile, no limit", hostile_seconds, f"{of_hostile.count(0.0)} wrong, as meant"))
    print(f"accuracy on {len(cases)} pairs of G1: math_answer {our_score}, Math-Verify {their_score}")
    ratios = {
        "math_verdicts": sum(their_seconds) / sum(our_seconds),
        "math_accuracy": our_score / their_score,
        "math_worst": (LIMIT_S + 0.5) / max(our_seconds + hostile_seconds),
    }
    for name, ratio in ratios.items():
        print(f"{name} ratio {ratio:.2f} bar {BARS[name]:.2f}")
    return int(options.check and any(ratio < BARS[name] for name, ratio in ratios.items()))


if __name__ == "__main__":
    sys.exit(main())
