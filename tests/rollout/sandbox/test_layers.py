"""Each wall by itself: what it refuses, that the probe sees what it lets through, and what is said where none holds."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from scoring_pools import wait_until
from towline.rollout.sandbox import zygote as zygote_module
from towline.rollout.sandbox.isolation import PROBE, Isolation, IsolationError, judge_probe
from towline.rollout.sandbox.limits import Limits
from towline.rollout.sandbox.sandbox import Sandbox, open_sandbox
from towline.rollout.sandbox.zygote import FILES, NO_FILES, NUM_SPARES, Zygote

ATTEMPTS = {line.split('"')[1] for line in PROBE.splitlines() if line.startswith('attempt("')}
BY_FILES = {"reads your files", "lists your folders", "writes files", "writes shared memory"}
"""What no filter of system calls prevents: opening a file to read it is a call that every program makes."""
LIMITS = Limits(seconds=10)


def started(**walls: Any) -> Sandbox:
    try:
        return Sandbox(**walls)
    except IsolationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=FILES)
def walled(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with closing(started(files=request.param, seccomp=True)) as box:
        yield box


def test_whole_walls_refuse_every_attempt(walled: Sandbox) -> None:
    assert walled.isolation.failures == ()
    assert walled.isolation.is_whole
    assert str(walled.isolation).startswith(f"seccomp + {walled.isolation.files}")


def test_without_walls_the_probe_sees_every_attempt_succeed() -> None:
    with closing(started(files=NO_FILES, seccomp=False)) as box:
        assert set(box.isolation.failures) == ATTEMPTS
        assert (box.isolation.is_whole, str(box.isolation)) == (False, "rlimits")
    assert len(ATTEMPTS) == 13


def test_the_probe_leaves_nothing() -> None:
    def found() -> set[str]:
        return set(os.listdir("/dev/shm"))

    before = found()
    for seccomp in (True, False):
        started(files=NO_FILES, seccomp=seccomp).close()
    assert found() <= before


def test_without_a_wall_around_files_they_are_seen_to_be_open() -> None:
    with closing(started(files=NO_FILES, seccomp=True)) as box:
        assert BY_FILES <= set(box.isolation.failures) <= BY_FILES | {"looks into other processes"}
        assert (box.isolation.is_whole, str(box.isolation)) == (False, "seccomp + rlimits")


def test_without_a_filter_of_system_calls_processes_are_seen_to_start() -> None:
    with closing(started(files="namespaces", seccomp=False)) as box:
        found = set(box.isolation.failures)
        assert {"starts processes", "opens local sockets"} <= found
        assert not found & BY_FILES
        assert not box.isolation.is_whole


def test_a_probe_that_does_not_run_proves_nothing() -> None:
    with pytest.raises(IsolationError, match=r"no program runs: Traceback\nOSError: no such file"):
        judge_probe(b"", "Traceback\nOSError: no such file")
    assert judge_probe(b"[]", "") == ()


def test_a_descriptor_sends_no_signals(walled: Sandbox) -> None:
    code = f"""
import fcntl, os, sys
target, (end, other) = int(sys.stdin.read()), os.pipe()
attempts = ((fcntl.F_SETOWN, target), (10, {signal.SIGKILL}), (fcntl.F_SETFL, os.O_ASYNC), (15, bytes(8)))
for command, argument in attempts:
    try:
        fcntl.fcntl(end, command, argument)
        print(command, end=" ")
    except OSError:
        pass
os.write(other, b"x")
"""
    witness = subprocess.Popen(["sleep", "600"])
    try:
        assert walled.run_program(code, str(witness.pid).encode(), LIMITS).output == b"4 "  # F_SETFL, of no effect
        assert walled.run_program("print(1)", b"", LIMITS).output == b"1\n"
        assert witness.poll() is None
    finally:
        witness.kill()
        witness.wait()


def test_root_has_no_capabilities_inside(walled: Sandbox) -> None:
    for pid in _family(walled):
        status = Path(f"/proc/{pid}/status").read_text()
        assert [line.split()[1] for line in status.splitlines() if line.startswith(("CapEff", "CapPrm"))] == [
            "0" * 16
        ] * 2


def test_what_is_installed_next_to_the_standard_library_cannot_be_read(walled: Sandbox, tmp_path: Path) -> None:
    installed = Path(os.__file__).parent / "site-packages"
    code = f"""
import os, sys
sys.path.append({str(installed)!r})
for attempt in (lambda: open({str(installed / "README.txt")!r}), lambda: __import__("pip")):
    try:
        attempt()
    except (OSError, ImportError):
        continue
    print("read")
"""
    assert installed.is_dir()
    found = walled.run_program(code, b"", LIMITS)
    assert (found.output, found.error) == (b"", "")


def test_spares_that_were_killed_are_replaced(walled: Sandbox) -> None:
    for _ in range(3):
        zygote, *spares = _family(walled)
        for pid in spares:
            os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: not set(spares) & set(_family(walled)))  # noqa: B023
        assert wait_until(lambda: len(_family(walled)) == 1 + NUM_SPARES)
        assert walled.run_program("print(1)", b"", LIMITS).output == b"1\n"
        assert walled.run_tests("f = 4", ["assert f == 4"], "", [], LIMITS, True)[-1] == {"done": True}
        assert _family(walled)[0] == zygote


def _family(box: Sandbox) -> list[int]:
    """Process ids of the zygote and its copies."""
    zygote = box._process.pid
    return [zygote, *map(int, Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split())]


def test_a_zygote_without_more_processes_says_so_and_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise BlockingIOError("no more processes")

    def no_children(*_: int) -> tuple[int, int]:
        raise ChildProcessError

    monkeypatch.setattr(zygote_module.os, "fork", refuse)
    monkeypatch.setattr(zygote_module.os, "waitpid", no_children)  # those of this process are not its own
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    job, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    zygote = Zygote(theirs, {"files": NO_FILES, "seccomp": False})
    monkeypatch.setattr(zygote, "_filter", object())  # or it would sweep the children of this process
    thread = threading.Thread(target=zygote.serve)
    with ours, theirs, job, end:
        job.settimeout(20.0)
        thread.start()
        for _ in range(2):
            order = {"kind": "program", "seconds": 1.0, "memory_bytes": 2**20}
            socket.send_fds(ours, [json.dumps(order).encode()], [end.fileno(), end.fileno()])
            assert json.loads(job.recv(4096)) == {"not_started": "no more processes"}
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()
    os.close(zygote._wakes)
    os.close(zygote._woken)


class _Box:
    def __init__(self, files: str, *, seccomp: bool, failures: tuple[str, ...] = ()) -> None:
        self.isolation = Isolation(
            files="" if files == NO_FILES else files, version=0, has_seccomp=seccomp, failures=failures
        )
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def _opened(outcomes: dict[tuple[str, bool], Any], **options: Any) -> tuple[Any, list[_Box]]:
    boxes: list[_Box] = []

    def start(*, files: str, seccomp: bool) -> Any:
        outcome = outcomes.get((files, seccomp), IsolationError(f"no {files}"))
        if isinstance(outcome, Exception):
            raise outcome
        boxes.append(_Box(files, seccomp=seccomp, failures=outcome))
        return boxes[-1]

    return open_sandbox(start=start, **options), boxes


def test_the_first_wall_that_holds_is_taken() -> None:
    box, _ = _opened({("landlock", True): (), ("namespaces", True): ()})
    assert box.isolation.files == "landlock"
    box, (leaky, _) = _opened({("landlock", True): ("writes files",), ("namespaces", True): ()})
    assert (box.isolation.files, leaky.is_closed, box.is_closed) == ("namespaces", True, False)


def test_without_walls_it_is_refused_with_reasons_and_a_mend() -> None:
    with pytest.raises(IsolationError) as raised:
        _opened({("namespaces", True): ("reads your files", "deletes files"), (NO_FILES, True): ()})
    said = str(raised.value)
    assert "no landlock" in said
    assert "seccomp + namespaces + rlimits: reads your files, deletes files" in said
    for mend in ("Linux 5.13", "landlock switched on", "user.max_user_namespaces", "allow_unsandboxed = true"):
        assert mend in said


def test_without_walls_it_is_taken_where_that_is_allowed() -> None:
    leaks = ("reads your files",)
    box, _ = _opened({(NO_FILES, True): leaks}, allow_unsandboxed=True)
    assert (str(box.isolation), box.isolation.failures) == ("seccomp + rlimits", leaks)
    box, _ = _opened({(NO_FILES, False): leaks}, allow_unsandboxed=True)
    assert str(box.isolation) == "rlimits"
    box, _ = _opened({("landlock", True): (), (NO_FILES, True): ()}, allow_unsandboxed=True)
    assert str(box.isolation) == "seccomp + landlock + rlimits"


ONE_VERDICT = """
from towline.rollout.rewards.code_tests import run_tests, run_stdio
from towline.rollout.sandbox.sandbox import sandbox
print(run_tests("import json\\ndef f(x): return 2 * x", ["assert f(2) == 4"]).value)
threaded = "import threading\\nthreading.Thread(target=lambda: print(input())).start()"
print(run_stdio(threaded, [("a", "a")]).value)
sandbox().close()
"""


def _in_own_process(script: str, *before: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*before, sys.executable, "-c", script], capture_output=True, text=True, check=False)


def test_limits_that_are_there_already_are_kept() -> None:
    limited = ["bash", "-c", 'ulimit -s 8192; ulimit -v 2000000; ulimit -n 100; exec "$@"', "-"]
    found = _in_own_process(ONE_VERDICT, *limited)
    assert (found.stdout, found.stderr) == ("1.0\n1.0\n", "")


def test_a_large_process_with_threads_has_verdicts_as_well() -> None:
    large = """
import mmap, threading
held = mmap.mmap(-1, 40 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=0)
for _ in range(200):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
    found = _in_own_process(large + ONE_VERDICT)
    assert (found.stdout, found.stderr) == ("1.0\n1.0\n", "")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="that kernel names itself otherwise to nobody")
def test_a_machine_whose_system_calls_are_unknown_is_refused() -> None:
    named_otherwise = "import ctypes; ctypes.CDLL(None).personality(8)\n"
    found = _in_own_process(named_otherwise + ONE_VERDICT)
    assert found.returncode == 1
    assert "programs cannot be shut in on this machine" in found.stderr
    assert "no table of system calls for i686; there are x86_64, aarch64" in found.stderr


def test_the_whole_standard_library_can_be_imported(walled: Sandbox) -> None:
    code = (
        "import importlib\nimportlib.invalidate_caches()\nimport wave, sqlite3, xml.dom.minidom, curses.ascii\nprint(1)"
    )
    outcome = walled.run_program(code, b"", Limits(seconds=30.0))
    assert (outcome.output, outcome.error) == (b"1\n", "")
