"""Start `towline run` as a user does, and look at it from outside."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "jobs" / "experiments" / "tiny-grpo.toml"
MODEL = ROOT / "models" / "tiny-sort"
STARTED_WITHIN_S = 180.0


class LiveRun:
    """A run in a process of its own, with its folder under `root`."""

    def __init__(self, root: Path, *overrides: str) -> None:
        options = [f"run.root={root}", "run.name=live", "rollout.prompts_per_step=8", *overrides]
        command = [sys.executable, "-m", "towline.launcher.cli", "run", str(EXPERIMENT)]
        self.folder = root / "live"
        self.output = root / "output.txt"
        with self.output.open("w") as output:
            self._popen = subprocess.Popen(
                [*command, *(part for option in options for part in ("-o", option))],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=root,
                env=os.environ | {"TOWLINE_ALLOW_LOGIN": "1"},
                start_new_session=True,
            )

    def wait_until(self, is_so: Callable[[], object], what: str, limit_s: float = STARTED_WITHIN_S) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert self._popen.poll() is None, f"ended while waiting for {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {what} within {limit_s} s:\n{self.text}"
            time.sleep(0.1)

    def wait(self, limit_s: float) -> int:
        """Exit code, once every process of the run is gone."""
        try:
            return self._popen.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {limit_s} s:\n{self.text}") from None

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        for process in self.processes():
            process.kill()
        self._popen.kill()
        self._popen.wait()

    @property
    def text(self) -> str:
        return self.output.read_text()

    @property
    def rows(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def processes(self) -> list[psutil.Process]:
        """Processes of this run, found by its folder in their environment."""
        mine = f"TOWLINE_RUN={self.folder}"
        found = []
        for process in psutil.process_iter():
            try:
                if mine.split("=")[1] == process.environ().get("TOWLINE_RUN"):
                    found.append(process)
            except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return found

    def find(self, module: str, rank: int | None = None) -> psutil.Process:
        """The process that runs a role's module (not its launcher), of a rank where there are several."""
        for process in self.processes():
            command = process.cmdline()
            if command[1:4] != ["-P", "-m", f"towline.jobs.{module}"]:
                continue
            if rank is None or process.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
                return process
        raise AssertionError(f"no process runs {module}")
