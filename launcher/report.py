"""The picture of a run: reward, held-out accuracy, and KL from the reference or margin of the pairs, over the steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from towline.storage.publish import replace_whole
from towline.storage.run_directory import RunDirectory, read_jsonl

INK, MUTED, GRID = "#1f2933", "#9aa5b1", "#e4e7eb"
REWARD, ACCURACY, KL = "#2f6fed", "#d9480f", "#5f3dc4"
Rows = Sequence[dict[str, Any]]


def draw_reward_curve(run: RunDirectory) -> None:
    """Write `reward.png` from the run's metrics and evaluations; nothing without a finished step."""
    rows, evaluations = read_jsonl(run.metrics), read_jsonl(run.evaluations)
    if not rows:
        return
    figure, axes = new_figure(run.root.name, [3, 2, 1.4] if evaluations else [3, 1.4])
    _draw_reward(axes[0], rows)
    if evaluations:
        _draw_accuracy(axes[1], evaluations)
    (_draw_margin if "preference/pairs" in rows[0] else _draw_kl)(axes[-1], rows)
    for one in axes:
        clean_axes(one)
    axes[-1].set_xlabel("policy version (steps taken)", color=INK)
    save_figure(figure, run.reward_curve)


def new_figure(title: str, heights: Sequence[float]) -> tuple[Any, list[Any]]:
    """A figure with one axes above the other.

    Args:
        heights: of the axes, relative to each other.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(8, 1.6 + sum(heights) * 0.75), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = np.atleast_1d(figure.subplots(len(heights), 1, sharex=True, height_ratios=list(heights)))
    figure.suptitle(title, x=0.02, ha="left", color=INK, fontsize=12, fontweight="bold")
    return figure, list(axes)


def save_figure(figure: Any, path: Path) -> None:
    with replace_whole(path) as temporary:
        figure.savefig(temporary, format="png")


def rolling_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean of each value and the `window` - 1 before it, as many as there are; what is not finite is left out."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0)


def column(rows: Rows, name: str) -> NDArray[np.float64]:
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], dtype=np.float64)


def _versions(rows: Rows) -> NDArray[np.float64]:
    """The rollouts of a step are judged before it is taken."""
    return column(rows, "step")


def _draw_reward(axes: Any, rows: Rows) -> None:
    draw_mean(axes, _versions(rows), column(rows, "reward/mean"), REWARD)
    axes.set_title("reward of the training rollouts, mean", loc="left", fontsize=10, color=INK)


def draw_mean(axes: Any, versions: NDArray[np.float64], values: NDArray[np.float64], color: str) -> None:
    """The values of all steps, and once they are many their mean over a tenth of them."""
    window = max(1, len(values) // 10)
    many = window > 1
    axes.plot(versions, values, color=color, lw=1, alpha=0.35 if many else 1, marker=None if many else "o", ms=4)
    if many:
        axes.plot(versions, rolling_mean(values, window), color=color, lw=2.2, label=f"mean of {window} steps")
        axes.legend(frameon=False, loc="best", labelcolor=INK)


def _draw_accuracy(axes: Any, evaluations: Rows) -> None:
    estimate = column(evaluations, "accuracy")
    # A Wilson interval may end at the estimate itself, give or take a rounding.
    errors = np.clip([estimate - column(evaluations, "low"), column(evaluations, "high") - estimate], 0.0, None)
    axes.errorbar(
        column(evaluations, "version"), estimate, yerr=errors, color=ACCURACY, marker="o", ms=5, lw=1.4, capsize=4
    )
    axes.set_title("held-out accuracy, with its 95 % interval", loc="left", fontsize=10, color=INK)


def _draw_kl(axes: Any, rows: Rows) -> None:
    kl = column(rows, "loss/kl")
    axes.plot(_versions(rows), kl, color=KL, lw=1.4)
    if np.isfinite(kl).any():
        axes.fill_between(_versions(rows), kl, color=KL, alpha=0.12, lw=0)
        axes.set_title("KL from the reference, nats per token", loc="left", fontsize=10, color=INK)
    else:
        axes.set_title("no reference: trainer.kl_beta is 0", loc="left", fontsize=10, color=MUTED)


def _draw_margin(axes: Any, rows: Rows) -> None:
    margin = column(rows, "preference/margin")
    axes.plot(_versions(rows), margin, color=KL, lw=1.4)
    axes.axhline(0, color=MUTED, lw=1)
    axes.set_title(
        "margin of the pairs: how much more the chosen gained on the reference", loc="left", fontsize=10, color=INK
    )


def clean_axes(axes: Any) -> None:
    axes.grid(axis="y", color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.locator_params(axis="x", integer=True)
