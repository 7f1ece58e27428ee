"""`towline status --follow`: the status again and again until the run has ended; its exit code is the run's."""

import time
from collections.abc import Hashable
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.text import Text

from towline.launcher.run_job import RunJob
from towline.launcher.run_word import LOST, exit_code_of, run_word
from towline.launcher.status import asked_job, status_lines
from towline.storage.checkpoints import newest_step
from towline.storage.run_directory import RunDirectory

LOOK_EVERY_S = 1.0
BLOCK_EVERY_S = 5.0
ASK_EVERY_S = 10.0
"""Slurm's controller serves the whole site."""
LOST_AFTER_S = 15.0
"""A shared file system may show the supervisor's last word later than Slurm shows the end of the job."""


@dataclass(slots=True)
class RunWatch:
    """Looks at a run's files often, and asks Slurm now and then, or when the files say something else than before."""

    run: RunDirectory
    job: RunJob | None = None
    _asked: float = field(default=-ASK_EVERY_S, init=False)
    _status: str = field(default="", init=False)
    _lost_since: float | None = field(default=None, init=False)

    def look(self) -> str:
        """Return the run's word."""
        status = str(self.run.read_state().get("status"))
        if status != self._status or time.monotonic() - self._asked >= ASK_EVERY_S:
            self._status, self._asked = status, time.monotonic()
            self.job = asked_job(self.run)
        return run_word(self.run, self.job)

    def exit_code(self) -> int | None:
        """None while the run goes on."""
        word = self.look()
        if word != LOST:
            self._lost_since = None
        elif self._lost_since is None:
            self._lost_since = time.monotonic()
        if word == LOST and time.monotonic() - (self._lost_since or 0.0) < LOST_AFTER_S:
            return None
        # After its last word a job is still there for a moment, and one that was requeued by hand waits again.
        return exit_code_of(self.run, word)


def follow_status(run: RunDirectory, console: Console) -> int:
    watch = RunWatch(run)
    return _live_view(watch, console) if console.is_terminal else _blocks(watch, console)


def _live_view(watch: RunWatch, console: Console) -> int:
    with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            code = watch.exit_code()
            live.update(Text(_status(watch)), refresh=True)
            if code is not None:
                return code
            time.sleep(LOOK_EVERY_S)


def _blocks(watch: RunWatch, console: Console) -> int:
    shown, shown_at = None, -BLOCK_EVERY_S
    while True:
        code = watch.exit_code()
        seen = what_counts(watch)
        if seen != shown and (code is not None or time.monotonic() - shown_at >= BLOCK_EVERY_S):
            separator = "" if shown is None else "\n"
            console.print(f"{separator}{_status(watch)}", soft_wrap=True, markup=False, highlight=False)
            console.file.flush()
            shown, shown_at = seen, time.monotonic()
        if code is not None:
            return code
        time.sleep(LOOK_EVERY_S)


def what_counts(watch: RunWatch) -> Hashable:
    """Changes when there is something new to see; clocks that go on are not."""
    run, job = watch.run, watch.job
    files = (run.metrics, run.evaluations, run.attempts_file)
    parts = () if job is None else tuple((part.state, part.reason, part.nodes) for part in job.components)
    return (
        run_word(run, job),
        tuple(path.stat().st_size if path.is_file() else 0 for path in files),
        newest_step(run.checkpoints),
        None if job is None else (job.id, parts, job.end, bool(job.silence)),
    )


def _status(watch: RunWatch) -> str:
    return "\n".join(status_lines(watch.run, now=time.time(), job=watch.job))
