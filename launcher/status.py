"""`towline status`: how a run is doing, from its files and, for a run on a cluster, from what Slurm says of its job."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from towline.jobs.experiment import RolloutExperiment
from towline.jobs.load_experiment import recorded_experiment
from towline.jobs.step_lines import EXAMPLE_LOSSES, evaluation_line, learned, number
from towline.launcher.example_outcome import loss_name
from towline.launcher.job_lines import history_text, job_lines, waits_text
from towline.launcher.run_job import RunJob, run_job
from towline.launcher.run_word import GOES_ON_BY_RESUME, LOST, UNDER_WAY, run_word, was_started
from towline.launcher.summary import duration
from towline.storage.checkpoints import checkpoint_path, newest_step
from towline.storage.dataset_files import shown
from towline.storage.run_directory import RunDirectory, read_jsonl

BLOCKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 20
RECENT_STEPS = 10


def print_status(run: RunDirectory) -> int:
    job = asked_job(run)  # may take a while
    print("\n".join(status_lines(run, now=time.time(), job=job)))
    return 0


def asked_job(run: RunDirectory) -> RunJob | None:
    """None for a run of one machine, and for one that was never handed in."""
    return run_job(run) if run.cluster.is_file() else None


def status_lines(run: RunDirectory, *, now: float, job: RunJob | None = None) -> Iterator[str]:
    experiment = recorded_experiment(run.config.read_text())
    state, rows = run.read_state(), read_jsonl(run.metrics)
    word = run_word(run, job)
    yield f"{run.root.name}  {word}  {_attempt_text(run, state, job, now)}"
    if job is not None:
        yield from job_lines(run, experiment, job, word, now)
    if word == LOST:
        yield from _lost_lines(run, state, job)
    yield _step_line(experiment.steps, rows, is_under_way=word in ("RUNNING", "STOPPING"), now=now)
    if rows:
        if isinstance(experiment, RolloutExperiment):
            yield _learning_line(rows)
            yield _waiting_line(rows)
        else:
            yield _example_line(rows)
        yield from _alarm_lines(run, rows)
    for row in read_jsonl(run.evaluations):
        yield evaluation_line(row)
    yield _kept_line(run, rows, now)
    if word == "FAILED" and state.get("fault"):
        yield str(state["fault"])
    if word in GOES_ON_BY_RESUME:
        yield f"next: towline resume {shown(run.root)}"


def _attempt_text(run: RunDirectory, state: dict[str, Any], job: RunJob | None, now: float) -> str:
    if job is None:
        return f"attempt {state.get('attempt', '-')}{_since(state, now)}"
    if job.is_waiting:
        return f"job {job.id} waits{waits_text(job, now)}{history_text(run, job)}"
    if "attempt" not in state or state.get("status") in ("queued", "requeued"):
        doing = "between two attempts" if was_started(run, job) else "starting"
        return f"job {job.id}{f', {doing}' if job.is_alive else ''}"
    return f"attempt {state['attempt']} of job {job.id}{_since(state, now)}{history_text(run, job)}"


def _lost_lines(run: RunDirectory, state: dict[str, Any], job: RunJob | None) -> Iterator[str]:
    kept = newest_step(run.checkpoints)
    if job is None or job.silence:
        yield (
            f"  its supervisor (process {state.get('pid')} on {state.get('host')}) is gone without a word: killed, out "
            "of memory, or the machine was started again"
        )
        yield f"  look at {shown(run.logs(state.get('attempt', 0)))}; a resume ends the processes it left on that host"
    else:
        yield f"  the files say {state.get('status')}, but the job has ended: its supervisor was not asked to stop"
        yield f"  look at towline logs {shown(run.root)} batch"
    yield f"  kept: {'no checkpoint' if kept is None else f'checkpoint {kept}'} and every sealed shard"


def _since(state: dict[str, Any], now: float) -> str:
    if "started" not in state:
        return ""
    if state.get("ended") is not None and state.get("status") not in UNDER_WAY:
        return f"  took {duration(state['ended'] - state['started'])}, ended {_ago(now - state['ended'])}"
    return f"  for {duration(max(0.0, now - state['started']))}"


def _step_line(num_steps: int, rows: Sequence[dict[str, Any]], *, is_under_way: bool, now: float) -> str:
    if not rows:
        return f"step 0/{num_steps}"
    done = rows[-1]["step"] + 1
    seconds = float(np.median([row["seconds/step"] for row in rows[-RECENT_STEPS:]]))
    left = (num_steps - done) * seconds
    ends = f"   ends ~{time.strftime('%H:%M', time.localtime(now + left))} (in {duration(left)})"
    last = rows[-1]
    staleness = f"staleness {last['staleness/max']:.0f}   " if last.get("staleness/max") is not None else ""
    return (
        f"step {done}/{num_steps}   policy v{last['version']:.0f}   {staleness}{seconds:.1f} s/step"
        f"{ends if is_under_way else ''}"
    )


def _learning_line(rows: Sequence[dict[str, Any]]) -> str:
    last = rows[-1]
    first_length, length = rows[0].get("completion/length"), last.get("completion/length")
    change = f" ({100 * (length / first_length - 1):+.0f} %)" if first_length and length is not None else ""
    return (
        f"reward {number(last.get('reward/mean'), '.3f')} {sparkline([row.get('reward/mean') for row in rows])}   "
        f"{learned(last)}   mismatch {number(last.get('mismatch/k3'), '.0e')}   "
        f"length {number(length, '.0f')}{change}"
    )


def _example_line(rows: Sequence[dict[str, Any]]) -> str:
    name = loss_name(rows[0])
    return (
        f"{EXAMPLE_LOSSES[name]} {number(rows[-1].get(name), '.4f')} {sparkline([row.get(name) for row in rows])}   "
        f"gradient {number(rows[-1].get('loss/gradient_norm'), '.2f')}   "
        f"{number(rows[-1].get('speed/tokens_per_s'), ',.0f')} tok/s"
    )


def _waiting_line(rows: Sequence[dict[str, Any]]) -> str:
    recent = rows[-RECENT_STEPS:]
    waited, for_scores = (_share_of_time(recent, name) for name in ("seconds/wait", "seconds/wait_scores"))
    failed = float(np.mean([row.get("reward/failed") or 0.0 for row in recent]))
    mend = ": towline samples --failed" if failed else ""
    scores = f" ({100 * for_scores:.0f} % for scores)" if for_scores >= 0.005 else ""
    return (
        f"trainer idle {100 * waited:.0f} %{scores}   reward failures {100 * failed:.1f} %{mend}   "
        f"(last {len(recent)} steps)"
    )


def _share_of_time(rows: Sequence[dict[str, Any]], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows) / max(1e-9, sum(row["seconds/step"] for row in rows))


def _alarm_lines(run: RunDirectory, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    since = rows[-1]["step"] - RECENT_STEPS
    yield from (f"! {row['text']}" for row in read_jsonl(run.alarms) if row["step"] > since)


def _kept_line(run: RunDirectory, rows: Sequence[dict[str, Any]], now: float) -> str:
    kept = newest_step(run.checkpoints)
    if kept is None:
        return "no checkpoint yet" if rows else "no checkpoint"
    return f"checkpoint {kept} ({_ago(now - _written(checkpoint_path(run.checkpoints, kept)))})"


def _written(checkpoint: Path) -> float:
    return max(entry.stat().st_mtime for entry in os.scandir(checkpoint))


def _ago(seconds: float) -> str:
    return f"{duration(max(0.0, seconds))} ago"


def sparkline(values: Sequence[float | None]) -> str:
    """At most 20 blocks, each the mean of its share of the values, between the least and the largest of these."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    parts = np.array_split(np.array(known), min(SPARK_WIDTH, len(known)))
    means = np.array([part.mean() for part in parts])
    spread = means.max() - means.min()
    heights = (means - means.min()) / spread * (len(BLOCKS) - 1) if spread > 0 else np.zeros(len(means))
    return "".join(BLOCKS[round(float(height))] for height in heights)
