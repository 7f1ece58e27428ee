"""`towline doctor` tries the walls for programs of code rewards."""

import os
import subprocess
import sys
from pathlib import Path

WITHOUT_WALLS = Path(__file__).parents[1] / "without_walls.py"
COMMAND = [sys.executable, "-P", "-m", "towline.launcher.cli", "doctor"]


def doctor(*before: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([*before, *COMMAND], env=environment, capture_output=True, text=True, check=False)


def test_each_wall_is_told_and_what_is_used() -> None:
    done = doctor()
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert all(line.startswith("sandbox  ") for line in lines[:-1])
    assert lines[-2].startswith("sandbox  ok       code rewards run programs behind seccomp + ")
    assert lines[-1] == "nothing failed"


def test_a_machine_without_walls_fails_with_the_reasons() -> None:
    done = doctor(sys.executable, str(WITHOUT_WALLS))
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[0].startswith("sandbox  missing  seccomp + landlock: ")
    assert lines[1].startswith("sandbox  missing  seccomp + namespaces: unshare: ")
    assert lines[2].startswith("sandbox  FAILED   code rewards: programs cannot be shut in on this machine (")
    assert lines[3] == "1 failed"
