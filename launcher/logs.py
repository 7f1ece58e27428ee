"""`towline logs`: which logs a run has, the end of one, and what is added to it, across requeues."""

import difflib
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from towline.launcher.follow import RunWatch
from towline.launcher.plan import size_text
from towline.launcher.text import printable
from towline.storage.dataset_files import shown
from towline.storage.errors import InputError
from towline.storage.run_directory import RunDirectory

BATCH = "batch"
"""The batch step's log, one file for all attempts."""
POLL_S = 0.5
LOOK_EVERY_S = 2.0
_PROCESS = re.compile(r"(trainer|rollout|scorer)\.\d+|supervisor|store|batch")
_LAST_BYTES = 1 << 20
_LINE_WIDTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    process: str
    attempt: int | None
    """None: of all attempts."""
    path: Path


def show_logs(run: RunDirectory, process: str | None, *, attempt: int | None, follow: bool, num_lines: int) -> int:
    """
    Raises:
        InputError: there is no such process or attempt.
    """
    if process is None and not follow:
        print("\n".join(list_lines(run, attempt, num_lines)))
        return 0
    if follow:
        _wait_for_log(run, process or BATCH, attempt)
    log = find_log(run, process or BATCH, attempt)
    print(_heading(log), flush=True)
    end = _print_tail(log.path, num_lines)
    return _follow(run, log, end, goes_on=attempt is None) if follow else 0


def list_lines(run: RunDirectory, attempt: int | None, num_lines: int) -> Iterator[str]:
    """A row a log, newest attempt first, and the end of the batch step's log."""
    logs = [log for log in all_logs(run) if attempt in (None, log.attempt)]
    if not logs:
        raise InputError(_none_text(run, attempt))
    width = max(len(log.process) for log in logs)
    for log in logs:
        size = log.path.stat().st_size
        of = "all" if log.attempt is None else str(log.attempt)
        yield f"attempt {of:>3}  {log.process:{width}}  {size_text(size):>9}  {_last_line(log.path)}".rstrip()
    batch = next((log for log in logs if log.process == BATCH), None)
    if batch is not None:
        yield f"\n{_heading(batch)}"
        yield from _tail(batch.path, num_lines)[0]


def all_logs(run: RunDirectory) -> list[Log]:
    """Newest attempt first, each attempt's by name; the batch step's at the end."""
    logs = [
        Log(process=path.stem, attempt=number, path=path)
        for number in sorted(_attempts(run), reverse=True)
        for path in sorted(run.logs(number).glob("*.log"))
    ]
    batch = run.logs(0).parent / f"{BATCH}.log"
    return [*logs, *([Log(process=BATCH, attempt=None, path=batch)] if batch.is_file() else [])]


def find_log(run: RunDirectory, process: str, attempt: int | None) -> Log:
    """The newest attempt's log of this process, or that attempt's.

    Raises:
        InputError: names the nearest, or all there are.
    """
    logs = all_logs(run)
    if attempt is not None and attempt not in _attempts(run):
        raise InputError(_none_text(run, attempt))
    there = [log for log in logs if log.attempt is None or attempt in (None, log.attempt)]
    if not there:
        raise InputError(_none_text(run, attempt))
    found = next((log for log in there if log.process == process), None)
    if found is None:
        names = sorted({log.process for log in there})
        near = difflib.get_close_matches(process, names, n=1)
        hint = f"Did you mean {near[0]}?" if near else f"There: {', '.join(names)}."
        where = f"attempt {attempt} of {run.root.name}" if attempt is not None else run.root.name
        raise InputError(f"{where} has no log of {process}. {hint}")
    return found


def _wait_for_log(run: RunDirectory, process: str, attempt: int | None) -> None:
    """A job that waits or starts has no logs yet; a name that no process can have is not waited for."""
    watch, is_told = RunWatch(run), False
    while _PROCESS.fullmatch(process) and not _has_log(run, process, attempt) and watch.exit_code() is None:
        if not is_told:
            print(f"{run.root.name} is {watch.look()}: waiting for the log of {process}", file=sys.stderr)
            is_told = True
        time.sleep(LOOK_EVERY_S)


def _has_log(run: RunDirectory, process: str, attempt: int | None) -> bool:
    return any(log.process == process and (log.attempt is None or attempt in (None, log.attempt))
               for log in all_logs(run))  # fmt: skip


def _attempts(run: RunDirectory) -> list[int]:
    names = (path.name.removeprefix("attempt-") for path in run.logs(0).parent.glob("attempt-*"))
    return [int(name) for name in names if name.isdecimal()]


def _none_text(run: RunDirectory, attempt: int | None) -> str:
    numbers = sorted(_attempts(run))
    if attempt is None or not numbers:
        return f"{run.root.name} has no logs yet: nothing of it was started. See: towline status {shown(run.root)}"
    return f"{run.root.name} has no attempt {attempt}. There: {', '.join(map(str, numbers))}."


def _follow(run: RunDirectory, log: Log, end: int, *, goes_on: bool) -> int:
    """Print what is added until the run, or the one attempt that was asked for, has ended; return the run's exit code.

    Args:
        goes_on: with the log of a newer attempt when there is one.
    """
    watch, next_look, code = RunWatch(run), 0.0, None
    while True:
        end = _print_from(log.path, end)
        newest = find_log(run, log.process, None)
        if newest.path != log.path:
            end = _print_from(log.path, end)
            if not goes_on:
                return 0
            log, end = newest, 0
            print(f"\n{_heading(log)}", flush=True)
            continue
        if code is not None:
            return code
        if time.monotonic() >= next_look:
            code, next_look = watch.exit_code(), time.monotonic() + LOOK_EVERY_S
        time.sleep(POLL_S)


def _heading(log: Log) -> str:
    of = "" if log.attempt is None else f"  attempt {log.attempt}"
    return f"==> {log.process}{of}  {shown(log.path)}"


def _print_tail(path: Path, num_lines: int) -> int:
    lines, end = _tail(path, num_lines)
    for line in lines:
        print(line)
    sys.stdout.flush()
    return end


def _tail(path: Path, num_lines: int) -> tuple[list[str], int]:
    """The last lines, and where they end."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _LAST_BYTES))
        data = file.read(size)
        end = file.tell()
    lines = data.decode(errors="replace").splitlines()
    return [_safe(line) for line in lines[-num_lines:]] if num_lines else [], end


def _print_from(path: Path, start: int) -> int:
    """Whole lines that were added since; the rest of a line comes when it is whole."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size < start:
            start = 0  # it was begun anew
        file.seek(start)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        print(_safe(line))
    sys.stdout.flush()
    return start + len(whole)


def _last_line(path: Path) -> str:
    lines = [line for line in _tail(path, 3)[0] if line.strip()]
    text = lines[-1].strip() if lines else ""
    return text if len(text) <= _LINE_WIDTH else f"{text[: _LINE_WIDTH - 1]}…"


def _safe(line: str) -> str:
    """Tabs stay; what could move the cursor is shown, not done."""
    return "\t".join(printable(piece) for piece in line.split("\t"))
