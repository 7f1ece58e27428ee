"""Hostile programs get the verdict they deserve in bounded time, and nothing of them stays (`hostile_programs.py`)."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from hostile_programs import GOOD, MARK, PROGRAMS, SECRET, SHARED_KEY, Hostile
from scoring_pools import children, is_running, open_files, wait_until
from towline.rollout.rewards.code_tests import CodeTests
from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.verdict import Verdict
from towline.rollout.sandbox.limits import Limits
from towline.rollout.sandbox.sandbox import sandbox
from towline.rollout.sandbox.zygote import NUM_SPARES
from towline.rollout.scoring import MAX_ITEM_CHARS, ScoringPool
from towline.storage.records import ScoreStatus

pytestmark = pytest.mark.slow
OVERHEAD_S = 5.0
"""For a machine with other work."""


@dataclass
class Machine:
    """What a program may be after, and whether it got it."""

    folder: Path
    witness: subprocess.Popen[bytes]
    listening: list[socket.socket]
    num_processes: int
    """Those that were there, the witness, the zygote and its spares."""
    places: dict[str, object]

    def state(self) -> dict[str, object]:
        kept = self.folder / "kept"
        shared = [line.split()[:1] for name in ("shm", "sem", "msg") for line in _lines(f"/proc/sysvipc/{name}")]
        folders = {"/tmp", "/var/tmp", "/dev/shm", "/run", "/", "/dev/mqueue", os.getcwd(), os.path.expanduser("~")}
        return {
            "folder": sorted(path.name for path in self.folder.iterdir()),
            "kept": (kept.read_text(), kept.stat().st_mode, kept.stat().st_uid, kept.stat().st_mtime),
            "marked": sorted(
                str(path) for name in folders if Path(name).is_dir() for path in Path(name).glob(f"{MARK}*")
            ),
            "shared": [key for key in shared if key == [str(SHARED_KEY)]],
            "reached": sum(_is_reached(one) for one in self.listening),
            "witness": is_running(self.witness.pid),
            "descriptors": open_files(),
        }


def _lines(path: str) -> list[str]:
    with suppress(OSError):
        return Path(path).read_text().splitlines()
    return []


def _is_reached(listening: socket.socket) -> bool:
    try:
        listening.recv(1) if listening.type == socket.SOCK_DGRAM else listening.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("users")
    sandbox().close()
    num_others = len(children())
    (folder / "kept").write_text("kept")
    (folder / "secret").write_text(SECRET)
    (folder / SECRET).touch()
    abstract = f"{MARK}-listening-{os.getpid()}"
    with ExitStack() as stack:
        tcp, udp, local, unnamed = (
            stack.enter_context(socket.socket(family, kind))
            for family, kind in (
                (socket.AF_INET, socket.SOCK_STREAM),
                (socket.AF_INET, socket.SOCK_DGRAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
                (socket.AF_UNIX, socket.SOCK_STREAM),
            )
        )
        tcp.bind(("127.0.0.1", 0))
        udp.bind(("127.0.0.1", 0))
        local.bind(str(folder / "socket"))
        unnamed.bind("\0" + abstract)
        for one in (tcp, local, unnamed):
            one.listen()
        for one in (tcp, udp, local, unnamed):
            one.setblocking(False)
        sleeping = [sys.executable, "-S", "-c", "import time; time.sleep(600)", SECRET]
        witness = subprocess.Popen(sleeping, env={"SECRET": SECRET})
        try:
            yield Machine(
                folder=folder,
                witness=witness,
                listening=[tcp, udp, local, unnamed],
                num_processes=num_others + 2 + NUM_SPARES,
                places={
                    "FOLDER": folder,
                    "WITNESS": witness.pid,
                    "PARENT": os.getpid(),
                    "TCP": tcp.getsockname()[1],
                    "UDP": udp.getsockname()[1],
                    "LOCAL": folder / "socket",
                    "ABSTRACT": abstract,
                },
            )
        finally:
            witness.kill()
            witness.wait()


def judged(hostile: Hostile, machine: Machine) -> Verdict:
    grade = CodeTests(limits=Limits(seconds=hostile.seconds, memory_mib=512, output_bytes=100_000))
    return grade(hostile.completion(machine.places), hostile.gold(machine.places))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_verdict_is_right_and_nothing_stays(machine: Machine, name: str) -> None:
    hostile = PROGRAMS[name]
    zygote = sandbox()
    assert wait_until(lambda: len(children()) == machine.num_processes)
    before = machine.state()
    began = time.monotonic()
    verdict = judged(hostile, machine)
    took = time.monotonic() - began

    assert (verdict.value, verdict.status) == (hostile.value, ScoreStatus.OK), verdict.detail
    assert hostile.says in verdict.detail
    json.dumps(verdict.detail).encode()
    assert took < (hostile.seconds if hostile.seconds < 5 else 5) + OVERHEAD_S
    assert judged(GOOD, machine).value == 1.0
    assert sandbox() is zygote
    assert wait_until(lambda: len(children()) == machine.num_processes)
    assert machine.state() == before


def test_many_at_once_do_not_disturb_each_other(machine: Machine) -> None:
    """Hostile programs in one thread, good ones in another, through one zygote."""
    values: list[float | None] = []
    thread = threading.Thread(target=lambda: values.extend(judged(GOOD, machine).value for _ in range(60)))
    thread.start()
    for name in (
        "thread bomb",
        "endless loop",
        "memory",
        "replies on every descriptor",
        "fork bomb",
        "closes everything",
    ):
        assert judged(PROGRAMS[name], machine).value == PROGRAMS[name].value
    thread.join()
    assert values == [1.0] * 60


def test_a_pool_grades_all_of_them_among_good_ones_and_is_unharmed(machine: Machine, tmp_path: Path) -> None:
    """As in a run: two workers, one limit for all, every hostile program beside a good one."""
    limit_s = 3.0
    # The pool reads no completion that is longer than any policy writes.
    programs = [one for one in PROGRAMS.values() if len(one.code) < MAX_ITEM_CHARS]
    assert len(programs) >= len(PROGRAMS) - 1
    items = [
        (one.completion(machine.places), one.gold(machine.places)) for program in programs for one in (program, GOOD)
    ]
    before = machine.state(), len(children())
    table = RewardConfig(use="code_tests", weight=1.0, limit_s=limit_s, memory_mib=512)
    with ScoringPool([table], 2, 30.0, tmp_path) as pool:
        scores = pool.score_many(items)
        assert pool._num_started == 2, "no worker was replaced"
    assert [score.detail for score in scores if score.status is not ScoreStatus.OK] == []
    assert [score.total for score in scores[::2]] == [program.value for program in programs]
    assert {score.total for score in scores[1::2]} == {1.0}
    assert wait_until(lambda: len(children()) == before[1])
    assert machine.state() == before[0]
