"""Which fault came first, and how to tell it. The last error of a run is nearly always an echo of the first."""

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from towline.storage.run_directory import RunDirectory

_KILLED_RANK = re.compile(r"process rank (\d+) with PID (\d+) on node (\S+) exited on\s+signal (\d+)")
_LAST_SIGNAL = 64
"""A shell answers 128 + signal; codes above 192 (255 is common) are a program's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    process: str
    what: str
    """One line."""
    log: str
    """path:line, or a path."""
    traceback: str = ""
    life: int = 0
    """How often the process was started before."""


def killed_fault(run: RunDirectory, attempt: int, process: str, code: int, launcher_log: Path) -> Fault | None:
    """A process that died of a signal left no record of its own; its launcher says which rank it was."""
    rank = None
    if launcher_log.is_file():
        matches = _KILLED_RANK.findall(" ".join(launcher_log.read_text(errors="replace").split()))
        rank = matches[0] if matches else None
    if rank is not None:
        name = f"{process}.{rank[0]}"
        return Fault(process=name, what=f"killed by {_signal_name(int(rank[3]))} (pid {rank[1]} on {rank[2]})",
                     log=str(run.log(attempt, name)))  # fmt: skip
    number = -code if code < 0 else code - 128
    if 1 <= number <= _LAST_SIGNAL:
        return Fault(process=process, what=f"killed by {_signal_name(number)}", log=str(run.log(attempt, process)))
    return None


def recorded_faults(run: RunDirectory, attempt: int) -> list[Fault]:
    """Faults that processes wrote themselves, earliest first."""
    rows = [json.loads(path.read_text()) for path in run.faults(attempt).glob("*.json")]
    return [
        Fault(
            process=row["process"],
            what=_one_line(row["error"], row["message"]),
            log=row["log"],
            traceback=row["traceback"],
            life=row["life"],
        )
        for row in sorted(rows, key=lambda row: row["when"])
    ]


def _one_line(error: str, message: str) -> str:
    """The message's first line that is not blank; the traceback has the others."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f"{error}: {lines[0]}" if lines else error


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (out of memory, or kill -9)" if name == "SIGKILL" else name
