"""The learning rate of an optimiser step, from its number alone: nothing is counted that a resume could count twice."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int,
    *,
    peak: float,
    schedule: Schedule,
    warmup_steps: int = 0,
    total_steps: int | None = None,
    floor_ratio: float = 0.0,
) -> float:
    """Rise in a line to the peak over the first `warmup_steps`, then stay, or fall to the floor over those that remain.

    Steps 0 .. warmup_steps - 1 have peak (step + 1) / warmup_steps. Later ones have, with x = (step - warmup_steps) /
    (total_steps - warmup_steps), "linear" 1 - x and "cosine" (1 + cos(pi x)) / 2 (Loshchilov and Hutter 2017,
    arXiv:1608.03983, eq. 5, without restarts) of the way from the floor to the peak; from `total_steps` on, the floor.

    After the warm-up these are the rates of transformers' schedules at the same step. Its warm-up is one step behind,
    step / warmup_steps, and its first step is lost at a rate of 0; here no step before `total_steps` has a rate of 0.

    Args:
        step: optimiser steps taken before, >= 0.
        warmup_steps: 0 for none.
        total_steps: of the run, more than `warmup_steps`; "constant" needs none.
        floor_ratio: floor / peak, in [0, 1].
    """
    assert step >= 0, f"step {step}, expected >= 0"
    if step < warmup_steps:
        return peak * ((step + 1) / warmup_steps)
    if schedule == "constant":
        return peak
    assert total_steps is not None, f'"{schedule}" needs total_steps'
    assert total_steps > warmup_steps, f"{warmup_steps} warm-up steps of {total_steps}, expected fewer"
    progress = min(1.0, (step - warmup_steps) / (total_steps - warmup_steps))
    height = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (floor_ratio + (1 - floor_ratio) * height)
