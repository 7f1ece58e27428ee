"""When a job may start, as far as Slurm says."""

import time
from datetime import datetime

from towline.jobs.slurm.command import slurm
from towline.storage.errors import SlurmError


def start_estimate(job: str) -> str:
    """Such as "earliest start 14:20 today (Slurm's estimate)"; the scheduler may not have looked at it yet."""
    start = start_time(job)
    if start is None:
        return "no estimate of the start yet"
    return f"earliest start {when(start)} (Slurm's estimate)"


def start_time(job: str) -> float | None:
    """Start or expected start of the component that starts last, s since the epoch."""
    try:
        said = slurm(["squeue", "--noheader", f"--jobs={job}", "--format=%S"], timeout_s=20).split()
        return max(datetime.fromisoformat(word).timestamp() for word in said)
    except (SlurmError, ValueError):  # gone, or "N/A"
        return None


def when(moment: float) -> str:
    that, today = datetime.fromtimestamp(moment), datetime.fromtimestamp(time.time())
    if that.date() == today.date():
        return f"{that:%H:%M} today"
    days = (that.date() - today.date()).days
    return f"{that:%H:%M} tomorrow" if days == 1 else f"{that:%a %d %b, %H:%M}"
