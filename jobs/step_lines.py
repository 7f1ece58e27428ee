"""One line for a step or an evaluation, as logs and terminals show it."""

from collections.abc import Mapping
from typing import Any

from towline.rollout.evaluation.statistics import Interval

Row = Mapping[str, Any]
EXAMPLE_LOSSES = {"loss/nll": "nll", "loss/preference": "loss", "loss/step_labels": "loss"}
"""Metric → its name in a line, of objectives that learn from given examples."""
MEASURES = {"nll": "nll", "win_rate": "win rate", "accuracy": "pair accuracy", "step_accuracy": "step accuracy"}
"""What is measured on held-out examples → its name in a line."""


def step_line(row: Row, num_steps: int) -> str:
    """Steps are counted from 1 here: 20/20 is the last."""
    width = len(str(num_steps))
    if "reward/mean" not in row and (name := next((name for name in EXAMPLE_LOSSES if name in row), None)) is not None:
        margin = f"margin {number(row['preference/margin'], '.3f')}  " if "preference/margin" in row else ""
        return (
            f"step {row['step'] + 1:>{width}}/{num_steps}  {EXAMPLE_LOSSES[name]} {number(row[name], '.4f')}  {margin}"
            f"gradient {number(row.get('loss/gradient_norm'), '.2f')}  "
            f"rate {number(row.get('loss/learning_rate'), '.1e')}  "
            f"{number(row.get('speed/tokens_per_s'), ',.0f')} tok/s  {number(row.get('seconds/step'), '.1f')} s"
        )
    parts = " ".join(
        f"{name} {number(row.get(f'seconds/{name}'), '.1f')}" for name in ("generate", "score", "train", "sync")
    )
    return (
        f"step {row['step'] + 1:>{width}}/{num_steps}  reward {number(row.get('reward/mean'), '.3f')}  "
        f"{learned(row)}  mismatch {number(row.get('mismatch/k3'), '.0e')}  "
        f"length {number(row.get('completion/length'), '.0f')}  {number(row.get('speed/tokens_per_s'), ',.0f')} tok/s  "
        f"{number(row.get('seconds/step'), '.1f')} s ({parts}){failures(row)}"
    )


def learned(row: Row) -> str:
    """How far a step on rollouts went: from the reference, or between the completions of its pairs."""
    if "preference/pairs" in row:
        return f"pairs {number(row['preference/pairs'], '.0f')}  margin {number(row.get('preference/margin'), '.3f')}"
    return f"kl {number(row.get('loss/kl'), '.4f')}"


def failures(row: Row) -> str:
    """Nothing where every reward of the step has a value."""
    failed = row.get("reward/failed")
    return f"  {100 * failed:.1f} % of the rewards failed" if failed else ""


def evaluation_line(row: Row) -> str:
    if "measure" in row:
        found = Interval(estimate=row["estimate"], low=row["low"], high=row["high"])
        return (
            f"held-out {MEASURES[row['measure']]} at version {row['version']}: {found} on {row['num_examples']} "
            f"examples ({row['seconds']:.1f} s)"
        )
    accuracy = Interval(estimate=row["accuracy"], low=row["low"], high=row["high"])
    failed = f", {row['num_failed']} could not be graded" if row["num_failed"] else ""
    return (
        f"held-out accuracy at version {row['version']}: {accuracy} on {row['num_prompts']} prompts{failed} "
        f"({row['seconds']:.1f} s)"
    )


def number(value: float | None, form: str) -> str:
    """A value that was not finite is written as null, and shown as a dash."""
    return "-" if value is None else format(value, form)
