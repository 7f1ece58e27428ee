"""Start `towline run` as a user does, look at it from outside, and do it harm."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "jobs" / "experiments" / "tiny-grpo.toml"
MODEL = ROOT / "models" / "tiny-sort"
PATIENCE_S = 500.0
"""For anything that ends at all: machines that others use too are several times slower at times."""


class LiveRun:
    """A run in a process of its own, with its folder under `root`."""

    def __init__(self, root: Path, *overrides: str, experiment: Path = EXPERIMENT) -> None:
        self.root, self.folder, self.output = root, root / "live", root / "output.txt"
        self._start("run", str(experiment), f"run.root={root}", "run.name=live", *overrides)

    def resume(self, *overrides: str) -> None:
        """Go on in another process; the output of the first is kept before it."""
        self._start("resume", str(self.folder), *overrides)

    def _start(self, verb: str, what: str, *overrides: str) -> None:
        command = [sys.executable, "-m", "towline.launcher.cli", verb, what]
        with self.output.open("a") as output:
            self.process = subprocess.Popen(
                [*command, *(part for option in overrides for part in ("-o", option))],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.root,
                env=os.environ | {"TOWLINE_ALLOW_LOGIN": "1"},
                start_new_session=True,
            )

    def wait_until(self, is_so: Callable[[], object], what: str, limit_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert self.process.poll() is None, f"ended while waiting for {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {what} within {limit_s} s:\n{self.text}"
            time.sleep(0.05)

    def wait(self, limit_s: float = PATIENCE_S) -> int:
        """Exit code of the command."""
        try:
            return self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {limit_s} s:\n{self.text}") from None

    def wait_until_gone(self, limit_s: float) -> None:
        """Until no process of the run is left."""
        deadline = time.monotonic() + limit_s
        while left := self.processes():
            assert time.monotonic() < deadline, f"left after {limit_s} s: {[one.cmdline() for one in left]}"
            time.sleep(0.1)

    def kill(self) -> None:
        for process in self.processes():
            process.kill()
        self.process.kill()
        self.process.wait()

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "state.json").read_text())

    def processes(self) -> list[psutil.Process]:
        """Processes of this run, found by its folder in their environment."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("TOWLINE_RUN") == str(self.folder)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            return False

    def find(self, name: str) -> psutil.Process:
        """A process by the name it has in logs and messages, such as "trainer.1", "store" or "supervisor"."""
        if name == "supervisor":
            return psutil.Process(self.process.pid)
        if name == "store":
            children = psutil.Process(self.process.pid).children()
            return next(child for child in children if "towline.jobs.store_process" in child.cmdline())
        role, _, number = name.partition(".")
        for process in self.processes():
            try:
                command, environment = process.cmdline(), process.environ()
            except psutil.NoSuchProcess:
                continue
            if command[1:4] != ["-P", "-m", f"towline.jobs.{role}_role"]:  # not its launcher
                continue
            if role == "trainer" and environment.get("OMPI_COMM_WORLD_RANK") != number:
                continue
            if role == "rollout" and command[4] != number:
                continue
            return process
        raise AssertionError(f"no process is {name}")

    @contextmanager
    def stopped(self, name: str) -> Iterator[psutil.Process]:
        """Inside the block the process does not move."""
        process = self.find(name)
        process.send_signal(signal.SIGSTOP)
        try:
            yield process
        finally:
            if process.is_running():
                process.send_signal(signal.SIGCONT)

    def store(self) -> Any:
        """A client of the run's control store, as one of its processes would have it."""
        from towline.jobs.control_store import ControlStore

        environment = self.find("scorer.0").environ()
        key = bytes.fromhex((self.folder / "store.key").read_text())
        return ControlStore(environment["TOWLINE_STORE"], key, int(environment["TOWLINE_ATTEMPT"]), 10.0)
