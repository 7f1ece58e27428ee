"""Every path of a run, one property each, and the lock that lets one supervisor at a time work in it."""

import errno
import fcntl
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from towline.storage.errors import RunFolderError
from towline.storage.publish import remove_leftovers, replace_whole
from towline.storage.records import ChunkId


@dataclass(frozen=True, slots=True)
class RunDirectory:
    root: Path

    @property
    def config(self) -> Path:
        """The resolved experiment, as JSON."""
        return self.root / "experiment.json"

    @property
    def source_config(self) -> Path:
        """The experiment file as the user wrote it."""
        return self.root / "experiment.toml"

    @property
    def environment(self) -> Path:
        """Git commit, package versions, host and command line of the latest attempt."""
        return self.root / "environment.json"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        return self.root / "evaluations.jsonl"

    @property
    def alarms(self) -> Path:
        """What the run said of itself when it looked wrong, one row each."""
        return self.root / "alarms.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def held_out(self) -> Path:
        """Shards of the evaluations; same layout as `rollouts`. Of given examples, what each of them measured."""
        return self.root / "held_out"

    @property
    def reference_tables(self) -> Path:
        """Log-probs of pairs under the reference of DPO."""
        return self.root / "reference"

    @property
    def lineage(self) -> Path:
        """Every version of the policy with the digest of its weights, and where branches fork."""
        return self.root / "lineage.jsonl"

    @property
    def aside(self) -> Path:
        """Shards and scores that are kept but never read: damaged, of other weights or data, or late duplicates."""
        return self.root / "aside"

    @property
    def aside_list(self) -> Path:
        """Why each file in `aside` is there."""
        return self.aside / "aside.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def cluster(self) -> Path:
        """The cluster profile it was submitted with, as JSON; a run of one machine has none."""
        return self.root / "cluster.json"

    @property
    def slurm(self) -> Path:
        """What was sent to Slurm, and submitit's files."""
        return self.root / "slurm"

    @property
    def code(self) -> Path:
        """Towline and the user's rewards as they were when the run was submitted."""
        return self.root / "code"

    @property
    def submissions(self) -> Path:
        """One row for each job that was handed to Slurm for this run."""
        return self.root / "submissions.jsonl"

    @property
    def attempts_file(self) -> Path:
        """When each attempt began and ended, on which nodes, and why it ended."""
        return self.root / "attempts.jsonl"

    @property
    def key(self) -> Path:
        """The secret that authenticates the control store's values."""
        return self.root / "store.key"

    @property
    def lock(self) -> Path:
        return self.root / "run.lock"

    @property
    def reward_curve(self) -> Path:
        return self.root / "reward.png"

    @property
    def loss_curve(self) -> Path:
        return self.root / "loss.png"

    def logs(self, attempt: int) -> Path:
        return self.root / "logs" / f"attempt-{attempt}"

    def log(self, attempt: int, process: str) -> Path:
        return self.logs(attempt) / f"{process}.log"

    def faults(self, attempt: int) -> Path:
        """One file per process that ended by an exception; the earliest is the first fault."""
        return self.logs(attempt) / "faults"

    @property
    def attempts(self) -> int:
        """How many times this run was started."""
        return sum(1 for _ in (self.root / "logs").glob("attempt-*"))

    @classmethod
    def create(cls, root: Path) -> Self:
        """Make a new run folder, readable by its owner only. An existing one is refused: nothing is overwritten."""
        try:
            _make_parent(root)
            root.mkdir(mode=0o700)
        except FileExistsError:
            in_use = is_locked(cls(root))
            raise RunFolderError(
                f"run folder {root} exists{' and a run is using it now' if in_use else ''}. "
                "Choose another with -o run.name=NAME (or -o run.root=DIR)."
            ) from None
        except OSError as error:
            raise RunFolderError(
                f"run folder {root} cannot be made: {error.strerror}. Set run.root to a folder you may write to."
            ) from error
        run = cls(root)
        descriptor = os.open(run.key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        return run

    @classmethod
    def open(cls, root: Path) -> Self:
        run = cls(root)
        if not run.config.is_file():
            raise RunFolderError(f"{root} is not a run folder: {run.config.name} is missing.")
        return run

    def chunk(self, chunk: ChunkId) -> Path:
        return self.rollouts / f"{chunk}.h5"

    def read_state(self) -> dict[str, Any]:
        return json.loads(self.state.read_text()) if self.state.is_file() else {}

    def write_state(self, **values: Any) -> None:
        """Change the named values of state.json, leaving the others."""
        write_json(self.state, {**self.read_state(), **values})


class RunLock:
    """Held by the one supervisor of a run; the kernel lets go of it when that process ends, however it ends."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._file = open(run.lock, "w")  # noqa: SIM115 - held open for as long as the lock
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RunFolderError(
                f"run folder {run.root} is in use by another supervisor. Wait for it, or choose another run.name."
            ) from None
        except OSError as error:
            self._file.close()
            raise RunFolderError(
                f"run folder {run.root} cannot be locked: {error.strerror}. Its file system must support flock "
                "(Lustre: mount with -o flock); set run.root to one that does."
            ) from error

    def __enter__(self) -> Self:
        self._remove_leftovers()
        return self

    def __exit__(self, *_: object) -> None:
        self._remove_leftovers()
        self._file.close()

    def _remove_leftovers(self) -> None:
        """Whoever holds the lock is the only one to start writers. Before the first starts and after the last has
        ended, what is half-written is dead."""
        for folder in (self._run.rollouts, self._run.held_out, self._run.aside, self._run.checkpoints):
            remove_leftovers(folder)


def is_locked(run: RunDirectory) -> bool:
    if not run.lock.is_file():
        return False
    with run.lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks: nobody can hold one
            return False
    return False


def write_json(path: Path, value: Any) -> None:
    with replace_whole(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON-lines file. A last line without its newline is still being written and is left out."""
    if not path.is_file():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in whole]


def _make_parent(root: Path) -> None:
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, f"{root.parent} is not a folder") from error
