"""Several launches of `mpirun` side by side: all must end well, and none stays behind."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parent


def launch_ranks(worker: Path, num_ranks: int, log: Path, *arguments: str | Path) -> "subprocess.Popen[bytes]":
    """Start a worker script as the ranks of one world, which write to `log`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI"))}
    environment |= {"OMP_NUM_THREADS": "1", "TOWLINE_NUM_TASKS": str(num_ranks), "HF_HUB_OFFLINE": "1"}
    # What pytest has on its own path.
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    mpirun = Path(sys.executable).parent / "mpirun"
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(num_ranks)]
    command = [mpirun, *flags, sys.executable, worker, *arguments]
    with log.open("w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output)


def wait_for_all(launches: Mapping[Path, "subprocess.Popen[bytes]"], limit_s: float) -> None:
    """
    Args:
        launches: by the log that each writes.
    """
    deadline = time.monotonic() + limit_s
    try:
        for log, process in launches.items():
            code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
            assert code == 0, log.read_text()[-6000:]
    finally:
        for process in launches.values():
            if process.poll() is None:
                process.kill()
                process.wait()
