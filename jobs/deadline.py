"""When an attempt must stop so that its checkpoint is written before Slurm ends it, and why. Imports no torch.

The time limit may be moved while the job runs, so it is asked for again now and then. How long a stop takes is what was
measured: the rest of a step's training, a save, and the end of the processes. USR2, which the batch script asks Slurm
to send some time before the limit, is what remains when nothing was measured yet; Slurm may send it a minute early.
Well before the limit it comes from a person, and is obeyed at once.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal

from towline.storage.errors import SlurmError

Reason = Literal["limit", "preempted", "stopped", "budget"]

ASK_AGAIN_S = 60.0
END_S = 10.0
"""For the processes to end and the scheduler to hear of it."""
SIGNAL_WINDOW_S = 420.0
"""USR2 comes at most five minutes and one before the limit, and one is for clocks."""
SAFETY = 1.5
"""Times what was measured: a shared file system has slow moments."""


@dataclass(slots=True)
class Deadline:
    """
    Args:
        ask_end: when the time limit ends the job, s since the epoch; None without a limit.
        budget_end: when the node-hours are used up, s since the epoch.
    """

    ask_end: Callable[[], float | None]
    budget_end: float | None = None
    is_in_job: bool = False
    """SIGTERM comes from Slurm, which takes the job away."""
    step_s: float = 0.0
    """Longest training and publication of a step so far, s: a stop waits for them."""
    save_s: float = 0.0
    """Longest save so far, s."""
    signals: list[int] = field(default_factory=list[int])
    """That the batch step received."""
    told: set[int] = field(default_factory=set[int])
    """That processes of the run received: Slurm sends some to steps only."""
    _end: float | None = None
    _asked: float = -ASK_AGAIN_S

    @contextlib.contextmanager
    def noting_signals(self) -> Generator[None]:
        """Inside the block SIGINT, SIGTERM and SIGUSR2 are added to `signals`; handlers do no more than that."""
        previous = {
            number: signal.signal(number, lambda number, frame: self.signals.append(number))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def needs_s(self) -> float:
        """From the decision to stop until everything has ended."""
        return SAFETY * (self.step_s + self.save_s) + END_S

    def note_step(self, row: dict[str, float]) -> None:
        self.step_s = max(self.step_s, row.get("seconds/train", 0.0) + row.get("seconds/sync", 0.0))

    def left_s(self) -> float | None:
        """Until the limit; None without one."""
        if time.monotonic() - self._asked >= ASK_AGAIN_S:
            self._asked = time.monotonic()
            with contextlib.suppress(SlurmError):  # the controller is away: what it said last holds
                self._end = self.ask_end()
        return None if self._end is None else self._end - time.time()

    @property
    def is_being_ended(self) -> bool:
        """What ends now ends because of that. Of a preemption with a grace only the processes hear at first."""
        return self.is_in_job and signal.SIGTERM in self.signals

    def __str__(self) -> str:
        left = self.left_s()
        limit = "no time limit" if left is None else f"{left:.0f} s to the time limit"
        return f"{limit}; a stop takes up to {self.needs_s:.0f} s (step {self.step_s:.1f} s, save {self.save_s:.1f} s)"

    def reason(self) -> Reason | None:
        """Why to stop now; None: go on."""
        received = {*self.signals, *self.told}
        if signal.SIGINT in received:
            return "stopped"
        if signal.SIGTERM in received:
            return "preempted"
        left = self.left_s()
        if signal.SIGUSR2 in received and not self._can_wait(left):
            return "limit"
        if self.budget_end is not None and self.budget_end - time.time() <= self.needs_s:
            return "budget"
        return "limit" if left is not None and left <= self.needs_s else None

    def _can_wait(self, left: float | None) -> bool:
        """The signal only says that the limit comes, and what a stop takes is known."""
        return left is not None and left < SIGNAL_WINDOW_S and self.step_s > 0 and self.save_s > 0
