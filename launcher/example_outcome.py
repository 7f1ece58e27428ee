"""What a run on given examples has learned: its loss and what held-out examples say, in words and as a picture."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from towline.jobs.step_lines import EXAMPLE_LOSSES, MEASURES, Row, number
from towline.launcher.report import ACCURACY, INK, REWARD, clean_axes, column, draw_mean, new_figure, save_figure
from towline.rollout.evaluation.statistics import ratio_interval
from towline.storage.held_out_values import read_held_out
from towline.storage.run_directory import RunDirectory, read_jsonl


def loss_name(row: Row) -> str:
    """Of the loss that this run's steps have."""
    return next(name for name in EXAMPLE_LOSSES if name in row)


def outcome_lines(run: RunDirectory, rows: Sequence[Row]) -> Iterator[str]:
    """Loss before → after, and the same of the held-out examples with the interval of their difference."""
    if rows:
        name = loss_name(rows[0])
        yield f"{EXAMPLE_LOSSES[name]:9} {number(rows[0][name], '.4f')} → {number(rows[-1][name], '.4f')}"
    evaluations = read_jsonl(run.evaluations)
    if len(evaluations) > 1:
        yield f"held-out  {_difference(run, evaluations[0], evaluations[-1])}"


def _difference(run: RunDirectory, first: Row, last: Row) -> str:
    before, after = read_held_out(run, first["version"]), read_held_out(run, last["version"])
    change = ratio_interval((after[:, 0] - before[:, 0]).tolist(), after[:, 1].astype(int).tolist())
    return (
        f"{MEASURES[first['measure']]} {first['estimate']:.3f} → {last['estimate']:.3f}   difference "
        f"{change.estimate:+.3f} ({change.low:+.3f} to {change.high:+.3f}), {len(before)} examples"
    )


def draw_loss_curve(run: RunDirectory) -> None:
    """Write `loss.png` from the run's metrics and evaluations; nothing without a finished step."""
    rows, evaluations = read_jsonl(run.metrics), read_jsonl(run.evaluations)
    if not rows:
        return
    name = loss_name(rows[0])
    figure, axes = new_figure(run.root.name, [3, 2] if evaluations else [3])
    draw_mean(axes[0], column(rows, "step"), column(rows, name), REWARD)
    unit = ", nats a token" if name == "loss/nll" else ""
    axes[0].set_title(f"loss of the training steps{unit}", loc="left", fontsize=10, color=INK)
    if evaluations:
        _draw_held_out(axes[1], evaluations)
    for one in axes:
        clean_axes(one)
    axes[-1].set_xlabel("model version (steps taken)", color=INK)
    save_figure(figure, run.loss_curve)


def _draw_held_out(axes: Any, evaluations: Sequence[dict[str, Any]]) -> None:
    estimate = column(evaluations, "estimate")
    ends = [estimate - column(evaluations, "low"), column(evaluations, "high") - estimate]
    axes.errorbar(
        column(evaluations, "version"), estimate, yerr=np.clip(ends, 0.0, None), color=ACCURACY, marker="o", ms=5,
        lw=1.4, capsize=4,
    )  # fmt: skip
    measure = MEASURES[evaluations[0]["measure"]]
    axes.set_title(f"held-out {measure}, with its 95 % interval", loc="left", fontsize=10, color=INK)
