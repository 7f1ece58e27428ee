"""The loop around what learns from given examples: SFT, DPO and reward models are an optimiser step each.

for each step t:
    examples = those of t, which follow from (seed, t) alone
    one optimiser step on them
    checkpoint and held-out examples, where they are due
"""

import time
from collections.abc import Callable
from typing import Protocol

Metrics = dict[str, float]


class Objective(Protocol):
    def take_step(self, step: int) -> Metrics:
        """Train on the examples of a step, an optimiser step; every rank calls it."""
        ...


def train(
    objective: Objective,
    *,
    steps: range,
    should_stop: Callable[[], bool],
    finish_step: Callable[[int, Metrics], None],
) -> int:
    """Train for `steps`; return the number of the step that would come next.

    Args:
        should_stop: asked before each step; the same on every rank.
        finish_step: takes the step's metrics (complete on rank 0), writes checkpoints; every rank calls it.
    """
    for step in steps:
        if should_stop():
            return step
        began = time.monotonic()
        metrics = objective.take_step(step)
        seconds = time.monotonic() - began
        metrics |= {
            "seconds/train": seconds,
            "seconds/step": seconds,
            "speed/tokens_per_s": metrics["tokens/trained"] / seconds,
            "version": step + 1,
        }
        finish_step(step, metrics)
    return steps.stop
