"""Submit runs to the development cluster as a user does, look at them from outside, and do them harm."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from towline.storage.run_directory import read_jsonl

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "tests" / "slurm" / "circle.toml"
DEV = ROOT / "env" / "clusters" / "dev.toml"
SCRIPTED = ("rollout.engine=scripted", "trainer.checkpoint_every=5")
"""The same circle without a model that generates: it starts in a third of the time."""
GO_ON_WITHIN_S = 300.0
"""Several times what a start takes on a machine that does other things too."""


def command(verb: str, *arguments: str, cwd: Path, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """`towline VERB …` as it is typed."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "towline.launcher.cli", verb, *arguments],
        cwd=cwd, text=True, capture_output=True, check=False, env=os.environ | {"TOWLINE_ALLOW_LOGIN": "1"},
    )  # fmt: skip
    assert not check or done.returncode == 0, f"{done.args}\n{done.stdout}\n{done.stderr}"
    return done


def options(overrides: tuple[str, ...]) -> list[str]:
    return [part for override in overrides for part in ("-o", override)]


def profile(folder: Path, name: str, **changes: str) -> Path:
    """The development cluster's profile with some lines changed: `table__field="VALUE"` in place of that line."""
    lines = DEV.read_text().splitlines()
    for key, value in changes.items():
        *table, field = key.rstrip("_").split("__")
        start = lines.index(f"[{'.'.join(table)}]") + 1 if table else 0
        end = next((number for number in range(start, len(lines)) if lines[number].startswith("[")), len(lines))
        lines[start:end] = [line for line in lines[start:end] if not line.startswith(f"{field} =")]
        lines.insert(start, f"{field} = {value}")
    path = folder / f"{name}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


class SlurmRun:
    def __init__(
        self,
        folder: Path,
        name: str,
        *overrides: str,
        cluster: Path = DEV,
        smoke: bool = False,
        experiment: Path = EXPERIMENT,
    ) -> None:
        self.root, self.folder = folder, folder / "runs" / name
        flags = ["--smoke"] if smoke else []
        arguments = ["--cluster", str(cluster), *flags, *options((*overrides, f"run.name={name}"))]
        self.said = command("submit", str(experiment), *arguments, cwd=folder).stdout

    @property
    def job(self) -> str:
        """The newest one."""
        return read_jsonl(self.folder / "submissions.jsonl")[-1]["job"]

    @property
    def log(self) -> str:
        path = self.folder / "logs" / "batch.log"
        return path.read_text() if path.exists() else ""

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.folder / "state.json").read_text())

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """What is known of each attempt, in order."""
        merged: dict[int, dict[str, Any]] = {}
        for row in read_jsonl(self.folder / "attempts.jsonl"):
            merged.setdefault(row["number"], {}).update(row)
        return [merged[number] for number in sorted(merged)]

    @property
    def num_steps(self) -> int:
        return len(read_jsonl(self.folder / "metrics.jsonl"))

    @property
    def checkpoints(self) -> list[int]:
        return sorted(
            int(path.parent.name.partition("-")[2]) for path in self.folder.glob("checkpoints/*/complete.json")
        )

    def wait_until(self, is_so: Callable[[], object], what: str, limit_s: float = GO_ON_WITHIN_S) -> None:
        deadline = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < deadline, f"no {what} within {limit_s:.0f} s\n{self.log[-3000:]}\n{self.queue()}"
            time.sleep(0.2)

    def wait_for_checkpoint(self, attempt: int) -> int:
        """A new one, in that attempt or a later one; returns its step."""
        self.wait_until(lambda: len(self.attempts) > attempt, f"attempt {attempt}")
        before = max(self.checkpoints, default=0)
        self.wait_until(lambda: max(self.checkpoints, default=0) > before, f"checkpoint after {before}")
        return max(self.checkpoints)

    def wait_until_done(self, limit_s: float = GO_ON_WITHIN_S) -> None:
        self.wait_until(lambda: self.state["status"] == "done", "end", limit_s)
        self.wait_until(lambda: not self.queue(), "end of the job", 60)

    def queue(self) -> str:
        """The run's jobs that have not ended."""
        jobs = ",".join(row["job"] for row in read_jsonl(self.folder / "submissions.jsonl"))
        done = slurm("squeue", "--noheader", f"--jobs={jobs}", "--format=%i %T %r", check=False)
        return done.stdout.strip()

    def find(self, process: str) -> dict[str, Any]:
        """Pid on its node and host of a process, as its heartbeat says it."""
        return self.heartbeats()[process]

    def heartbeats(self) -> dict[str, Any]:
        """From the control store, as a process of the run sees it."""
        from towline.jobs.control_store import ControlStore

        address, attempt = self._store_address()
        key = bytes.fromhex((self.folder / "store.key").read_text())
        store = ControlStore(address, key, attempt, 10.0)
        names = ["trainer.0", "trainer.1", "rollout.0", "rollout.1", "scorer.0"]
        return {name: store.get(f"heartbeat/{name}") for name in names}

    def _store_address(self) -> tuple[str, int]:
        """Of the newest attempt: in the environment of its processes, which are all on this machine."""
        found: tuple[str, int] = ("", -1)
        for environment in _environments():
            if environment.get("TOWLINE_RUN") == str(self.folder) and "TOWLINE_STORE" in environment:
                found = max(
                    found, (environment["TOWLINE_STORE"], int(environment["TOWLINE_ATTEMPT"])), key=lambda x: x[1]
                )
        assert found[0], "no process of the run was found"
        return found


def slurm(*words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run(words, text=True, capture_output=True, check=False)
    assert not check or done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done


def _environments() -> Iterator[dict[str, str]]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            pairs = path.read_bytes().decode(errors="replace").split("\0")
            yield dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)
