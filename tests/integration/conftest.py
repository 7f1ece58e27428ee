"""A run that nothing happens to; and no test of whole runs leaves anything on the machine."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from integration.fault_runs import EXPERIMENT
from integration.own_shared_memory import own_shared_memory
from integration.runs import LiveRun

SHARED_MEMORY = Path("/dev/shm")
_sees_others = False
"""Segments of runs that are tested beside these."""


def pytest_configure(config: pytest.Config) -> None:
    global _sees_others
    _sees_others = hasattr(config, "workerinput") and not own_shared_memory()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = LiveRun(tmp_path_factory.mktemp("undisturbed"), experiment=EXPERIMENT)
    assert run.wait() == 0, run.text
    return run.folder


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Neither a process that was started in a folder of the tests, nor a shared-memory segment."""
    folder = tmp_path_factory.getbasetemp()
    before = set(os.listdir(SHARED_MEMORY)), set(_processes_in(folder))
    yield
    # A test that fails, or kills a run in its middle, leaves the others to end by themselves.
    deadline = time.monotonic() + 15
    while not set(_processes_in(folder)) <= before[1]:
        assert time.monotonic() < deadline, f"left: {set(_processes_in(folder)) - before[1]}"
        time.sleep(0.1)
    assert _sees_others or set(os.listdir(SHARED_MEMORY)) <= before[0]


def _processes_in(folder: Path) -> list[int]:
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()).is_relative_to(folder):
                found.append(process.pid)
        except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found
