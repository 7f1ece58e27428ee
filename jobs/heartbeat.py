"""Tell the supervisor what a process is doing, and that it moves.

The counter goes up only when work was done; a thread carries it to the control store once a second. A process that
is stopped, or hangs in a collective, is seen by a counter that stands still. The thread counts its own rounds too:
where those stand still the process itself is stopped, and its peers hang because of it.
"""

import os
import socket
import threading
import time
from typing import Any

from towline.jobs.control_store import ControlStore
from towline.storage.errors import StoreError

PERIOD_S = 1.0


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
        }
        self._since = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self, phase: str | None = None) -> None:
        """A piece of work is done; with `phase`, another kind of work begins."""
        if phase is not None and phase != self._state["phase"]:
            self._state["phase"] = phase
            self._since = time.monotonic()
        self._state["beats"] += 1

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _carry(self) -> None:
        try:
            store = ControlStore(*self._arguments)
            while True:
                self._state["rounds"] += 1
                store.set(self._name, {**self._state, "phase_s": round(time.monotonic() - self._since, 1)})
                if self._stop.wait(PERIOD_S):
                    return
        except StoreError:
            # The main thread meets the same error at its next call and reports it; a second report helps nobody.
            return
