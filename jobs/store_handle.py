"""The supervisor's handle on the control store's process. Torch-free: it asks over the process's pipe."""

import contextlib
import json
import queue
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from towline.jobs.launch import StoreCommand
from towline.jobs.store_values import seal, unseal
from towline.storage.errors import StoreError

START_TIMEOUT_S = 120.0
_ANSWER_TIMEOUT_S = 10.0


class StoreHandle:
    """Starts the store; `address` is host:port. Close ends the store and with it the run's control plane."""

    def __init__(self, key: bytes, attempt: int, log: Path, start: StoreCommand) -> None:
        self._key, self._prefix = key, f"attempt-{attempt}/"
        self.asked = time.time()
        """When the process was asked for, s since the epoch."""
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                start.command,
                env={**start.environment, "TOWLINE_STORE_HOST": start.host},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="store-answers", daemon=True)
        self._reader.start()
        self._is_silent = False
        try:
            self.address = self._answer(START_TIMEOUT_S).strip()
            self.ready = time.time()
        except StoreError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def get(self, name: str) -> Any | None:
        answer = self._ask({"get": self._prefix + name})
        return None if answer is None else unseal(self._key, name, answer.encode("latin-1"))

    def set(self, name: str, value: Any) -> None:
        sealed = seal(self._key, name, value).decode("latin-1")
        self._ask({"set": self._prefix + name, "value": sealed})

    def exchange(self, name: str, old: Any | None, new: Any) -> bool:
        """As `ControlStore.exchange`."""
        expected = "" if old is None else seal(self._key, name, old).decode("latin-1")
        sealed = seal(self._key, name, new).decode("latin-1")
        return self._ask({"exchange": self._prefix + name, "old": expected, "value": sealed}) == sealed

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=0 if self._is_silent else 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            raise StoreError(f"the control store's process ended with code {self._process.poll()}.") from None
        return json.loads(self._answer(_ANSWER_TIMEOUT_S))

    def _answer(self, timeout_s: float) -> str:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self._is_silent = True
            raise StoreError(f"the control store's process is silent for {timeout_s:g} s.") from None
        if not line:
            raise StoreError(f"the control store's process ended with code {self._process.wait(timeout=5)}.")
        return line

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._answers.put(line)
        self._answers.put("")
