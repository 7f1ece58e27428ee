"""The last lines of a run: what it cost, what it brought, and where to look further."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from towline.jobs.experiment import ExperimentConfig, RolloutExperiment
from towline.jobs.step_lines import number
from towline.launcher.example_outcome import outcome_lines
from towline.launcher.held_out import held_out_summary
from towline.rollout.score_timings import readable
from towline.storage.checkpoints import checkpoint_path, newest_step
from towline.storage.dataset_files import shown
from towline.storage.run_directory import RunDirectory, read_jsonl


def summary_lines(run: RunDirectory, experiment: ExperimentConfig, seconds: float) -> Iterator[str]:
    rows = read_jsonl(run.metrics)
    yield ""
    yield f"steps     {len(rows)}/{experiment.steps} in {duration(seconds)}"
    name = run.root.name
    where = "" if run.root.parent == experiment.run.root.cwd() / "runs" else f" --root {shown(run.root.parent)}"
    if not isinstance(experiment, RolloutExperiment):
        yield from outcome_lines(run, rows)
        yield from _picture(run.loss_curve)
        yield from _model(run)
        yield f"look      towline status {name}{where}"
        return
    if rows:
        rewards = [row.get("reward/mean") for row in rows]
        yield f"reward    {number(rewards[0], '.3f')} → {number(rewards[-1], '.3f')}"
        yield from _scoring_lines(run, rows)
    if (accuracy := held_out_summary(run)) is not None:
        yield f"held-out  {accuracy}"
    yield from _picture(run.reward_curve)
    yield f"look      towline status {name}{where} · towline samples {name}{where}"
    if rows:
        yield f"prove     towline replay {name}{where} --step {rows[-1]['step']}"


def _picture(path: Path) -> Iterator[str]:
    if path.is_file():
        yield f"picture   {shown(path)}"


def _model(run: RunDirectory) -> Iterator[str]:
    """Where the next stage takes it from."""
    if (step := newest_step(run.checkpoints)) is not None:
        yield f"model     {shown(checkpoint_path(run.checkpoints, step) / 'hf')}"


def _scoring_lines(run: RunDirectory, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """How long the rewards take, and how many failed, if any did."""
    parts = sorted({name.split("/", 2)[2] for row in rows for name in row if name.startswith("scoring/")})
    for part in parts:
        p50, p99 = (_median([row.get(f"scoring/{name}/{part}") for row in rows]) for name in ("p50_s", "p99_s"))
        longest = max((row.get(f"scoring/max_s/{part}") or 0.0 for row in rows), default=0.0)
        yield f"scoring   {part}: p50 {readable(p50)}, p99 {readable(p99)}, longest {readable(longest)}"
    failed = sum(row.get("reward/failed") or 0.0 for row in rows) / len(rows)
    if failed:
        yield f"failures  {100 * failed:.1f} % of the rewards: towline samples {run.root.name} --failed"


def _median(values: Sequence[float | None]) -> float:
    return statistics.median([value for value in values if value is not None] or [0.0])


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
