"""One process of a run through its lives: it may end, and be started again alone while the others go on."""

import dataclasses
import time
from dataclasses import dataclass

from towline.jobs.launch import Launcher, Process, ProcessSpec
from towline.jobs.processes import TRAINER

_FIRST_PAUSE_S = 1.0
"""Before the first restart; four times as long before each further one."""


@dataclass(slots=True)
class Member:
    spec: ProcessSpec
    launcher: Launcher
    life: int = 0
    _process: Process | None = None
    _starts_at: float = 0.0
    """On the monotonic clock, while no process runs."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def can_restart(self) -> bool:
        """An engine has nothing that the trainer does not send again, and a scorer nothing at all."""
        return self.name != TRAINER

    is_retired: bool = False
    """Its node is gone: it is never started again."""

    @property
    def is_running(self) -> bool:
        return self._process is not None

    def start_if_due(self) -> None:
        if self._process is None and not self.is_retired and time.monotonic() >= self._starts_at:
            life = {"TOWLINE_LIFE": str(self.life)}
            spec = dataclasses.replace(self.spec, environment={**self.spec.environment, **life})
            self._process = self.launcher.start(spec)

    def poll(self) -> int | None:
        """Exit code of the present life; None while it runs, or waits for its start."""
        return None if self._process is None else self._process.poll()

    def end(self, grace_s: float) -> None:
        """Returns when nothing of it is left."""
        if self._process is not None:
            self._process.end(0.0 if self._process.poll() is not None else grace_s)

    def signal(self, number: int) -> None:
        if self._process is not None:
            self._process.signal(number)

    def retire(self) -> None:
        """Once the process has ended."""
        self._process, self.is_retired = None, True

    def begin_next_life(self) -> float:
        """Once the process has ended; return the seconds until it is started again."""
        pause = _FIRST_PAUSE_S * 4**self.life
        self.life += 1
        self._process, self._starts_at = None, time.monotonic() + pause
        return pause
