"""Tell the supervisor what a process is doing, and that it moves.

The counter goes up only when work was done; a thread carries it to the control store once a second. A process that
is stopped, or hangs in a collective, is seen by a counter that stands still. The thread counts its own rounds too:
where those stand still the process itself is stopped, and its peers hang because of it.

Under Slurm a signal may reach the steps of a job and not its batch script. The thread carries that too: Python's own
handlers do not run while the main thread waits inside a collective.
"""

import os
import select
import signal
import socket
import threading
import time
from typing import Any

import psutil

from towline.jobs.control_store import ControlStore
from towline.storage.errors import StoreError

PERIOD_S = 1.0
_CLOSE = b"\0"
"""No signal has this number."""


def _began() -> float:
    """Of this process, s since the epoch; where nothing noted it, as the kernel knows it: to a second."""
    noted = os.environ.get("TOWLINE_BEGAN")
    return psutil.Process().create_time() if noted is None else float(noted)


class Heartbeat:
    def __init__(self, address: str, key: bytes, attempt: int, process: str, life: int = 0) -> None:
        self._name = f"heartbeat/{process}"
        self._arguments = (address, key, attempt)
        self._state: dict[str, Any] = {
            "phase": "start",
            "beats": 0,
            "rounds": 0,
            "life": life,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "signal": 0,
            "phases": {"began": _began(), "start": time.time()},
        }
        self._since = time.monotonic()
        self._received, self._sends = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._carry, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self, phase: str | None = None) -> None:
        """A piece of work is done; with `phase`, another kind of work begins."""
        if phase is not None and phase != self._state["phase"]:
            self._state["phase"] = phase
            self._state["phases"].setdefault(phase, time.time())
            self._since = time.monotonic()
        self._state["beats"] += 1

    def note_signals(self, *numbers: int) -> None:
        """Tell the supervisor of these signals, and outlive them. For the main thread."""
        for number in numbers:
            signal.signal(number, lambda received, frame: None)
        # Written by the C handler, also while Python's waits for the main thread.
        signal.set_wakeup_fd(self._sends, warn_on_full_buffer=False)

    def close(self) -> None:
        os.write(self._sends, _CLOSE)
        self._thread.join()
        os.close(self._sends)
        os.close(self._received)

    def _carry(self) -> None:
        try:
            store = ControlStore(*self._arguments)
            while True:
                self._state["rounds"] += 1
                phases = dict(self._state["phases"])
                phase_s = round(time.monotonic() - self._since, 1)
                store.set(self._name, {**self._state, "phases": phases, "phase_s": phase_s})
                if select.select([self._received], [], [], PERIOD_S)[0]:
                    received = os.read(self._received, 64)
                    if _CLOSE in received:
                        return
                    self._state["signal"] = received[-1]
        except StoreError:
            # The main thread meets the same error at its next call and reports it; a second report helps nobody.
            return
