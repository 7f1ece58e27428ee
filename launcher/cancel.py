"""`towline cancel`: an orderly stop with a checkpoint, or with --now an end at once."""

import os
import signal
import socket
import time
from typing import Any

import psutil

from towline.jobs.slurm.attempts import AttemptBook
from towline.jobs.slurm.command import slurm
from towline.launcher.run_job import RunJob, live_jobs, run_job
from towline.launcher.run_word import UNDER_WAY, run_word
from towline.storage.checkpoints import newest_step
from towline.storage.dataset_files import shown
from towline.storage.errors import InputError
from towline.storage.run_directory import RunDirectory, is_locked

_BETWEEN_INTERRUPTS_S = 0.5
_INTERRUPTS_THAT_END = 3
"""So many make a supervisor end everything without waiting for the step."""


def cancel_run(run: RunDirectory, *, now: bool) -> int:
    """
    Raises:
        InputError: the run is not active, or runs on another machine.
        SlurmError: Slurm does not answer, or refuses.
    """
    return _cancel_jobs(run, now=now) if run.cluster.is_file() else _cancel_here(run, now=now)


def _cancel_jobs(run: RunDirectory, *, now: bool) -> int:
    jobs = live_jobs(run)
    if not jobs:
        raise InputError(_not_active(run, f"no job of it waits or runs; it is {run_word(run, run_job(run))}"))
    # Those that wait first: the end of the job before it would start a successor.
    for job in sorted(jobs, key=lambda job: not job.is_waiting):
        if job.is_waiting:
            slurm(["scancel", job.id])
            print(f"job {job.id} is cancelled; it was waiting")
        elif now or not _has_begun(run, job):
            slurm(["scancel", job.id])
            print(f"job {job.id} is ended now, without a new checkpoint; kept: {_kept(run)}")
        else:
            slurm(["scancel", "--batch", "--signal=INT", job.id])
            print(
                f"job {job.id} is asked to stop: it finishes its step, writes a checkpoint and ends; it is not "
                f"requeued. If that takes too long: towline cancel {shown(run.root)} --now"
            )
    print(f"next    towline status {shown(run.root)} --follow; to go on later: towline resume {shown(run.root)}")
    return 0


def _has_begun(run: RunDirectory, job: RunJob) -> bool:
    """Whether a supervisor is there that listens; before, nothing could be lost."""
    rows = AttemptBook(run).rows()
    return bool(rows) and rows[-1].job == job.id and not rows[-1].outcome


def _cancel_here(run: RunDirectory, *, now: bool) -> int:
    state = run.read_state()
    if state.get("status") not in UNDER_WAY:
        raise InputError(_not_active(run, f"it is {run_word(run)}"))
    if state["host"] != socket.gethostname():
        raise InputError(
            f"{run.root.name} runs on {state['host']}, and this is {socket.gethostname()}. There: "
            f"towline cancel {run.root.absolute()}"
        )
    if not (psutil.pid_exists(state["pid"]) and is_locked(run)):
        raise InputError(_not_active(run, f"its supervisor (process {state['pid']}) is gone"))
    _interrupt(state, times=_INTERRUPTS_THAT_END if now else 1)
    if now:
        print(f"{run.root.name} is ended now, without a new checkpoint; kept: {_kept(run)}")
    else:
        print(
            f"{run.root.name} is asked to stop: it finishes its step, writes a checkpoint and ends. If that takes too "
            f"long: towline cancel {shown(run.root)} --now"
        )
    print(f"next    towline status {shown(run.root)} --follow; to go on later: towline resume {shown(run.root)}")
    return 0


def _interrupt(state: dict[str, Any], *, times: int) -> None:
    for number in range(times):
        if number:
            time.sleep(_BETWEEN_INTERRUPTS_S)
        try:
            os.kill(state["pid"], signal.SIGINT)
        except ProcessLookupError:  # ended meanwhile
            return
        except PermissionError as error:
            raise InputError(f"process {state['pid']} is another user's: only they can cancel it.") from error


def _kept(run: RunDirectory) -> str:
    kept = newest_step(run.checkpoints)
    return f"{'no checkpoint' if kept is None else f'checkpoint {kept}'} and every sealed shard"


def _not_active(run: RunDirectory, why: str) -> str:
    return f"{run.root.name} is not active: {why}. Nothing was cancelled."
