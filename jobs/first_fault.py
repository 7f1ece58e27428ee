"""Which fault came first, and how to tell it. The last error of a run is nearly always an echo of the first."""

import contextlib
import dataclasses
import json
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towline.jobs.member import Member
from towline.jobs.processes import TRAINER
from towline.storage.checkpoints import newest_step
from towline.storage.errors import RunFault
from towline.storage.run_directory import RunDirectory

_KILLED_RANK = re.compile(r"process rank (\d+) with PID (\d+) on node (\S+) exited on\s+signal (\d+)")
_SRUN_ENDED = re.compile(r"^srun: error: (\S+): tasks? (\d+)[\d,-]*: (.+)$", re.MULTILINE)
"""srun's line for the tasks of a node that ended; the first one is the cause, the others were then terminated."""
_SRUN_REFUSED = re.compile(r"^srun: error: Application launch failed: (.+)$", re.MULTILINE)
_SRUN_SIGNALS = {
    "Killed": signal.SIGKILL,
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Out Of Memory": signal.SIGKILL,
    "Terminated": signal.SIGTERM,
}
NEARLY_FULL_BYTES = 16 * 2**20
"""With less the disk may be the cause: torch.save aborts the process when it cannot finish its file."""
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
    fault = _killed_fault(run, attempt, process, code, launcher_log)
    if fault is not None:
        with contextlib.suppress(OSError):  # a file system that does not answer hides no fault
            free = shutil.disk_usage(run.root).free
            if free <= NEARLY_FULL_BYTES:
                what = f"{fault.what}; no more than {free} bytes are free in {run.root}"
                return dataclasses.replace(fault, what=what)
    return fault


def _killed_fault(run: RunDirectory, attempt: int, process: str, code: int, launcher_log: Path) -> Fault | None:
    said = launcher_log.read_text(errors="replace") if launcher_log.is_file() else ""
    # The log of an engine has its earlier lives too; the trainer has one, and its first task to end is the cause.
    ended, refused = list(_SRUN_ENDED.finditer(said)), list(_SRUN_REFUSED.finditer(said))
    if refused and (not ended or ended[-1].start() < refused[-1].start()):
        return Fault(process=process, what=f"Slurm did not start it: {refused[-1][1]}", log=str(launcher_log))
    if ended:
        return _killed_task(run, attempt, process, *ended[0 if process == TRAINER else -1].groups())
    matches = _KILLED_RANK.findall(" ".join(said.split()))
    rank = matches[0] if matches else None
    if rank is not None:
        name = f"{process}.{rank[0]}"
        return Fault(process=name, what=f"killed by {_signal_name(int(rank[3]))} (pid {rank[1]} on {rank[2]})",
                     log=str(run.log(attempt, name)))  # fmt: skip
    number = -code if code < 0 else code - 128
    if 1 <= number <= _LAST_SIGNAL:
        return Fault(process=process, what=f"killed by {_signal_name(number)}", log=str(run.log(attempt, process)))
    return None


def _killed_task(run: RunDirectory, attempt: int, process: str, node: str, rank: str, how: str) -> Fault | None:
    """None for a task that ended by itself: its own record says why."""
    number = next((number for name, number in _SRUN_SIGNALS.items() if how.startswith(name)), None)
    if number is None:
        return None
    name = f"{process}.{rank}" if process == TRAINER else process
    return Fault(process=name, what=f"killed by {_signal_name(number)} (on {node})", log=str(run.log(attempt, name)))


def first_faults(
    run: RunDirectory,
    attempt: int,
    members: Sequence[Member],
    store_code: int | None,
    told: Sequence[dict[str, Any]] = (),
) -> list[Fault]:
    """All faults, first one first. A process killed from outside comes before the errors that its peers then met.

    Args:
        told: faults that processes could not write to the run folder.
        store_code: exit code of the control store, None while it runs.
    """
    recorded = recorded_faults(run, attempt, told)
    named = {(fault.process, fault.life) for fault in recorded}
    ended = [(member, code) for member in members if (code := member.poll())]
    killed = [
        fault
        for member, code in ended
        if (fault := killed_fault(run, attempt, member.name, code, member.spec.log)) is not None
        and (fault.process, member.life) not in named
    ]
    if store_code is not None:
        log = str(run.log(attempt, "store"))
        killed.insert(0, Fault(process="store", what=f"ended with code {store_code}", log=log))
    # Faults of earlier lives were survived.
    lives = {member.name: member.life for member in members}
    faults = killed + [fault for fault in recorded if fault.life == lives.get(fault.process, 0)]
    if faults or not ended:
        return faults
    member, code = ended[0]
    tail = _tail(member.spec.log)
    what = f"ended with code {code}{tail and f'; the last lines of its log: {tail}'}"
    return [Fault(process=member.name, what=what, log=str(member.spec.log))]


def run_fault(run: RunDirectory, faults: Sequence[Fault], *, can_resume: bool) -> RunFault:
    """What the user reads: who was first, its traceback and log, what is kept, what to type."""
    first = faults[0]
    kept = newest_step(run.checkpoints)
    lines = [
        f"{run.root.name} FAILED: {first.process}: {first.what}",
        *(f"    {line}" for line in first.traceback.strip().splitlines()[-6:]),
        f"  log     {first.log}",
        f"  kept    {'no checkpoint' if kept is None else f'checkpoint {kept}'}; nothing sealed was lost",
    ]
    if len(faults) > 1:
        lines.append(f"  after   {', '.join(fault.process for fault in faults[1:])} (see faults/ beside the logs)")
    if can_resume:
        lines.append(f"  next    towline resume {run.root}")
    return RunFault("\n".join(lines), checkpoint_kept=kept is not None)


def recorded_faults(run: RunDirectory, attempt: int, told: Sequence[dict[str, Any]] = ()) -> list[Fault]:
    """Faults that processes wrote themselves or told, earliest first."""
    rows = [*(json.loads(path.read_text()) for path in run.faults(attempt).glob("*.json")), *told]
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


def _tail(log: Path) -> str:
    """The last lines; not those of srun, which ends the other tasks."""
    lines = log.read_text(errors="replace").strip().splitlines() if log.is_file() else []
    return " | ".join([line for line in lines if not line.startswith(("srun:", "slurmstepd:"))][-3:])
