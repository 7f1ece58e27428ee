"""Several launches of `mpirun` side by side: all must end well, and none stays behind."""

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path


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
