"""Rows of squeue as towline asks for them, of jobs with a trainer and a rollout component."""

SCRIPT = "callable.sh"
SINCE = "2026-01-02T03:04:05"


def running(job: str, script: str = "(null)", rollout: str = "r[0-1]", num_rollout: int = 2) -> tuple[str, str]:
    return (
        f"{job}+0|RUNNING|None|{SINCE}|2|t[0-1]|29:30|{SINCE}|{script}",
        f"{job}+1|RUNNING|None|{SINCE}|{num_rollout}|{rollout}|29:30|{SINCE}|{script}",
    )


def pending(
    job: str, script: str = "(null)", *, reasons: tuple[str, str] = ("Priority", "Priority"), start: str = "N/A"
) -> tuple[str, str]:
    trainer, rollout = (
        f"{job}+{number}|PENDING|{reason}|{start}|2||30:00|{SINCE}|{script}" for number, reason in enumerate(reasons)
    )
    return trainer, rollout
