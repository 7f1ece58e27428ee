"""Make a run's folder such that the next attempt can go on from it. Imports no torch."""

import contextlib
import os
from collections.abc import Callable

import psutil

from towline.jobs.experiment import ExperimentConfig
from towline.jobs.work import evaluation_work, training_work
from towline.storage.checkpoints import newest_step
from towline.storage.metrics import cut_rows
from towline.storage.run_directory import RunDirectory
from towline.storage.set_aside import repair

_END_WITHIN_S = 10.0


def prepare_resume(
    run: RunDirectory, attempt: int, experiment: ExperimentConfig, tell: Callable[[str], None]
) -> int | None:
    """Clear away what the attempts before left half-done; return the checkpoint to go on from, None without one.

    Nothing sealed is lost: shards that are damaged or were sampled otherwise are set aside, and rows of steps that
    will be trained again are kept in the logs.
    """
    if attempt == 0:
        return None
    if ended := end_leftover_processes(run):
        tell(f"{ended} processes that an earlier attempt left behind were ended")
    checkpoint = newest_step(run.checkpoints)
    first_step = checkpoint or 0
    for work in (training_work(experiment, run), evaluation_work(experiment, run)):
        if work is not None:
            for one in repair(run, from_step=first_step, attempt=attempt, sampling_hash=work.sampling_hash,
                              folder=work.folder):  # fmt: skip
                tell(f"{one.path} is set aside: {one.reason}")
    superseded = run.logs(attempt) / "superseded.jsonl"
    num_again = cut_rows(run.metrics, lambda row: row["step"] < first_step, superseded)
    cut_rows(run.evaluations, lambda row: row["version"] <= first_step, superseded)
    if checkpoint is None:
        tell("no checkpoint was kept: training begins again with step 0, on the shards that are there")
    else:
        again = f"; steps trained again after it: {num_again}" if num_again else ""
        tell(f"going on from checkpoint {checkpoint}{again}")
    return checkpoint


def end_leftover_processes(run: RunDirectory) -> int:
    """Kill processes of this run on this host whose supervisor is gone; return how many. Call with the run's lock."""
    left = [process for process in psutil.process_iter() if _is_of(process, run)]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_END_WITHIN_S)
    return len(left)


def _is_of(process: psutil.Process, run: RunDirectory) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get("TOWLINE_RUN") == str(run.root.resolve())
    except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
