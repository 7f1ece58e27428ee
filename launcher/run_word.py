"""How a run is doing, in one word, from its files and from what Slurm says of its job; and the exit code of its end."""

import socket
from typing import Any

import psutil

from towline.jobs.slurm.attempts import AttemptBook
from towline.launcher.run_job import RunJob
from towline.storage.checkpoints import newest_step
from towline.storage.run_directory import RunDirectory, is_locked

UNDER_WAY = ("running", "stopping")
FINISHED = ("done", "failed", "stopped", "budget")
LOST = "LOST"
BUDGET = "BUDGET REACHED"
GOES_ON_BY_RESUME = ("STOPPED", LOST, "CANCELLED", "INTERRUPTED")


def run_word(run: RunDirectory, job: RunJob | None = None) -> str:
    """
    Args:
        job: what Slurm says; None for a run of one machine.
    """
    state = run.read_state()
    status = state.get("status")
    if job is None or job.silence:
        return _word_of_files(run, state)
    if job.is_waiting:
        return "REQUEUED" if was_started(run, job) else "PENDING"
    if job.is_halted:
        return "SUSPENDED"
    if job.is_alive:
        # Slurm keeps a job for some moments after its end, and before its supervisor writes its first word.
        if status in FINISHED:
            return _word_of_end(run, status)
        return "STOPPING" if status == "stopping" or job.is_ending else "RUNNING"
    if status in FINISHED:
        return _word_of_end(run, status)
    if status == "queued" and job.end in ("FAILED", "CANCELLED"):
        return job.end
    # Who is asked to end says so before it does; who is killed cannot.
    return "CANCELLED" if job.end == "CANCELLED" and status != "running" else LOST


def was_started(run: RunDirectory, job: RunJob) -> bool:
    return any(row.job == job.id for row in AttemptBook(run).rows())


def exit_code_of(run: RunDirectory, word: str) -> int | None:
    """Of the run's end; None while it goes on or has not begun."""
    if word == "DONE":
        return 0
    if word == BUDGET:
        return 5
    if word == "STOPPED":
        return 3
    if word in ("FAILED", LOST, "CANCELLED", "INTERRUPTED"):
        return 1 if newest_step(run.checkpoints) is None else 3
    return None


def _word_of_files(run: RunDirectory, state: dict[str, Any]) -> str:
    """What the state file says, unless the supervisor that wrote it is gone."""
    status = state.get("status")
    if status is None:
        return "NOT STARTED"
    if status in UNDER_WAY and not _is_supervised(run, state):
        return LOST
    return "PENDING" if status == "queued" else _word_of_end(run, str(status))


def _word_of_end(run: RunDirectory, status: str) -> str:
    rows = AttemptBook(run).rows()
    is_budget = status == "budget" or (status == "stopped" and bool(rows) and rows[-1].outcome == "budget")
    return BUDGET if is_budget else status.upper()


def _is_supervised(run: RunDirectory, state: dict[str, Any]) -> bool:
    """Locks may not be seen from another host; there the state file is taken at its word."""
    if state.get("host") != socket.gethostname():
        return True
    return psutil.pid_exists(int(state["pid"])) and is_locked(run)
