"""The development cluster of env/slurm, for all tests here; each gets a folder that all of its nodes see."""

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "env/slurm"
FOLDER = Path(os.environ.get("TOWLINE_SLURM", "/var/tmp/towline-slurm")).resolve()


def script(name: str, *arguments: str) -> str:
    done = subprocess.run(["bash", SCRIPTS / name, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{name} {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done.stdout


def slurm(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Cluster:
    shared: Path
    """Where this session's tests may write for all nodes to see."""
    folder: Path = FOLDER

    def new_folder(self, name: str) -> Path:
        path = self.shared / name
        path.mkdir()
        return path

    def up(self) -> str:
        return script("up.sh")

    def crash(self, name: str) -> None:
        script("node.sh", "crash", name)

    def boot(self, name: str) -> None:
        script("node.sh", "boot", name)

    def states(self) -> dict[str, str]:
        lines = slurm("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def wait_idle(self, timeout_s: float = 60) -> None:
        """Until no job is left on a node, and every node takes one."""
        deadline = time.monotonic() + timeout_s
        while set((states := self.states()).values()) != {"idle"}:
            assert time.monotonic() < deadline, f"{states}\n{slurm('squeue', '--all')}"
            time.sleep(0.2)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Starts it where it is not running, and then stops it at the end."""
    was_running = "running" in script("status.sh")
    script("up.sh")
    shared = Path(mkdtemp(prefix="tests-", dir=FOLDER / "shared"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(FOLDER / "etc/slurm.conf"))
        yield Cluster(shared)
    if not was_running:
        script("down.sh")
