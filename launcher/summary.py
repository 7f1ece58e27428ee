"""The last lines of a run: what it cost, what it brought, and where to look further."""

from collections.abc import Iterator

from towline.jobs.experiment import ExperimentConfig
from towline.jobs.step_lines import number
from towline.launcher.held_out import held_out_summary
from towline.storage.dataset_files import shown
from towline.storage.run_directory import RunDirectory, read_jsonl


def summary_lines(run: RunDirectory, experiment: ExperimentConfig, seconds: float) -> Iterator[str]:
    rows = read_jsonl(run.metrics)
    yield ""
    yield f"steps     {len(rows)}/{experiment.steps} in {duration(seconds)}"
    if rows:
        rewards = [row.get("reward/mean") for row in rows]
        yield f"reward    {number(rewards[0], '.3f')} → {number(rewards[-1], '.3f')}"
    if (accuracy := held_out_summary(run)) is not None:
        yield f"held-out  {accuracy}"
    if run.reward_curve.is_file():
        yield f"picture   {shown(run.reward_curve)}"
    name = run.root.name
    where = "" if run.root.parent == experiment.run.root.cwd() / "runs" else f" --root {shown(run.root.parent)}"
    yield f"look      towline status {name}{where} · towline samples {name}{where}"
    if rows:
        yield f"prove     towline replay {name}{where} --step {rows[-1]['step']}"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
