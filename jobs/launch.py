"""Start the processes of a run. One small interface; here its local implementation (subprocess and mpirun).

`srun.py` has the other, for a Slurm allocation.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import psutil

from towline.jobs.devices import assign_gpus, visible, visible_gpus
from towline.storage.errors import InputError

_MARK = "TOWLINE_LAUNCH"
"""Environment variable with a value of its own for each process that is started; its tasks inherit it."""
_FOREIGN_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PMI2_", "PRTE_", "SLURM_", "SBATCH_", "SRUN_", "SALLOC_")
_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


GroupName = Literal["trainer", "rollout", "scorer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    name: str
    """Such as "rollout.1" or "trainer"."""
    module: str
    """Run as `python -P -m MODULE ARGUMENTS`: the working folder is not on the import path."""
    arguments: tuple[str, ...] = ()
    group: GroupName = "scorer"
    number: int = 0
    """Which process of its group; the trainer's ranks are one."""
    num_tasks: int | None = None
    """Ranks of one MPI world; None for a process without MPI."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    log: Path
    """Takes what the launcher says, and what a process says before it opens its own log."""


class Process(Protocol):
    """A started `ProcessSpec`, possibly several tasks under one launcher."""

    spec: ProcessSpec

    def poll(self) -> int | None:
        """Exit code once ended; negative for a signal."""
        ...

    def signal(self, number: int) -> None:
        """Send it to all of its tasks."""
        ...

    def end(self, grace_s: float) -> None:
        """Ask all of its tasks to end, and kill what is left after `grace_s`. Returns when nothing is left."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCommand:
    """How the control store's process is started."""

    command: tuple[str, ...]
    host: str
    """Address by which every process of the run reaches it."""
    environment: Mapping[str, str]


class Launcher(Protocol):
    @property
    def transfer_backend(self) -> str:
        """What weights travel over, "gloo" or "nccl"."""
        ...

    def store_command(self) -> StoreCommand: ...

    def start(self, spec: ProcessSpec) -> Process: ...

    def lost_node(self, spec: ProcessSpec) -> str | None:
        """The node of a process that cannot be started again because the node is gone."""
        ...


STORE_MODULE = "towline.jobs.store_process"


class LocalLauncher:
    """Every process on this machine; an MPI world under `mpirun`.

    Raises:
        InputError: fewer GPUs than trainer ranks.
    """

    def __init__(self, *, trainer_ranks: int = 1, engines: int = 1) -> None:
        self._devices = assign_gpus(visible_gpus(), trainer_ranks=trainer_ranks, engines=engines)

    @property
    def transfer_backend(self) -> str:
        return self._devices.transfer_backend

    def store_command(self) -> StoreCommand:
        command = (sys.executable, "-P", "-m", STORE_MODULE)
        return StoreCommand(command=command, host="127.0.0.1", environment=os.environ)

    def start(self, spec: ProcessSpec) -> "LocalProcess":
        command = [sys.executable, "-P", "-m", spec.module, *spec.arguments]
        environment = own_environment() | visible(self._gpus(spec)) | dict(spec.environment)
        if spec.num_tasks is not None:
            environment["TOWLINE_NUM_TASKS"] = str(spec.num_tasks)
            command = [*_mpirun(spec.num_tasks), *command]
        environment[_MARK] = mark = secrets.token_hex(8)
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            popen = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A Ctrl-C in the terminal is the supervisor's to handle.
                start_new_session=True,
            )
        return LocalProcess(spec, popen, mark)

    def lost_node(self, spec: ProcessSpec) -> None:
        """This machine is here."""

    def _gpus(self, spec: ProcessSpec) -> tuple[str, ...]:
        by_group = {"trainer": (self._devices.trainer,), "rollout": self._devices.engines, "scorer": ()}[spec.group]
        return by_group[spec.number] if spec.number < len(by_group) else ()


class LocalProcess:
    def __init__(self, spec: ProcessSpec, popen: "subprocess.Popen[bytes]", mark: str) -> None:
        self.spec = spec
        self._popen = popen
        self._mark = mark

    def poll(self) -> int | None:
        return self._popen.poll()

    def signal(self, number: int) -> None:
        for process in self._tasks():
            if process.pid != self._popen.pid or self.spec.num_tasks is None:
                _signal(process, number)

    def end(self, grace_s: float) -> None:
        tasks = self._tasks()
        for process in tasks:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while any(map(_is_alive, tasks)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for process in tasks:
            _signal(process, signal.SIGKILL)
        psutil.wait_procs(tasks, timeout=5)
        self._popen.wait(timeout=10)

    def _tasks(self) -> list[psutil.Process]:
        """The launcher, its descendants, and tasks that outlived a launcher that was killed: these have its mark."""
        marked = [process for process in psutil.process_iter() if _has_mark(process, self._mark)]
        descendants = [child for process in marked for child in _children(process)]
        return list({process.pid: process for process in [*marked, *descendants]}.values())


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _is_alive(process: psutil.Process) -> bool:
    try:
        # is_running compares start times, so that a number used again is not mistaken for ours.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def own_environment() -> dict[str, str]:
    """Ours without what another launcher left in it: a process must not take itself for a rank of that one."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN_PREFIXES) and name not in _FOREIGN
    }


def _mpirun(num_tasks: int) -> list[str]:
    beside_python = Path(sys.executable).with_name("mpirun")
    mpirun = shutil.which("mpirun") or (str(beside_python) if beside_python.is_file() else None)
    if mpirun is None:
        raise InputError(
            "mpirun was found neither on the PATH nor beside Python. Run env/setup.sh, which installs Open MPI."
        )
    # Several ranks on one core, no binding to it, and root (in a container) are all usual on one machine.
    return [mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(num_tasks)]
