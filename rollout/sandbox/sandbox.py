"""Run programs nobody has read in processes that can do nothing but compute.

    outcome = sandbox().run_program("print(int(input()) * 2)", b"21\n", Limits())

`sandbox()` is this process's own; any number of threads may use it at once. Behind it is a zygote (`zygote.py`) that
makes copies of itself, which takes less than half as long as an interpreter takes to start.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import towline
from towline.rollout.sandbox.isolation import PROBE, Isolation, IsolationError, judge_probe
from towline.rollout.sandbox.limits import Limits
from towline.rollout.sandbox.zygote import FILES, MAX_PACKET_BYTES, NO_FILES, TESTS_NOT_BEGUN
from towline.storage.errors import RewardError

START_LIMIT_S = 60.0
"""For an interpreter from a cold parallel file system."""
KILL_LIMIT_S = 10.0
MAX_ERROR_BYTES = 4096
_START = (
    "import os, sys; sys.path.append({!r}); os.register_at_fork = lambda **_: None; "
    "from towline.rollout.sandbox.zygote import main; main()"
)
"""What modules would do in each copy is for processes with threads; random numbers start anew there anyway."""
_KEPT_ENVIRONMENT = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""Without these the interpreter of an environment module does not start; programs do not see them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramOutcome:
    output: bytes
    error: str
    """The end of what was printed to standard error."""
    exit_code: int | None
    """As the shell has it, negative for signals; None: it was killed for its time or its output."""
    has_timed_out: bool = False
    has_printed_too_much: bool = False
    seconds: float = 0.0
    """Wall time, with that of the end of it."""


class SandboxEnded(RewardError):
    """The zygote was killed from outside; another try gets a new one."""


class Sandbox:
    def __init__(self, *, files: str, seccomp: bool) -> None:
        """Start the zygote; `sandbox()` chooses the arguments.

        Args:
            files: what hides them, one of `zygote.FILES`, or "none".
            seccomp: whether system calls are filtered.

        Raises:
            IsolationError: it cannot be had here.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = str(Path(towline.__path__[0]).parent)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-S", "-B", "-P", "-X", "utf8", "-c", _START.format(package),
                    str(theirs.fileno()), json.dumps({"files": files, "seccomp": seccomp}),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
                | {"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )  # fmt: skip
        try:
            said = self._hello()
            if "failed" in said:
                raise IsolationError(said["failed"])
            self.isolation = Isolation(
                files=files if files in FILES else "",
                version=said["ready"],
                has_seccomp=seccomp,
                failures=self._probe(),
            )
        except BaseException:
            self.close()
            raise

    def _hello(self) -> dict[str, Any]:
        self._control.settimeout(START_LIMIT_S)
        try:
            packet = self._control.recv(MAX_PACKET_BYTES)
        except TimeoutError:
            raise IsolationError(f"the sandbox did not start within {START_LIMIT_S:g} s") from None
        self._control.settimeout(None)
        if not packet:
            raise IsolationError(f"the sandbox ended at its start (exit code {self._process.wait()})")
        return json.loads(packet)

    def _probe(self) -> tuple[str, ...]:
        """What a program can do here that it is not to."""
        with tempfile.TemporaryDirectory(prefix="towline-probe-") as folder:
            secret = Path(folder, "secret")
            secret.write_text("secret")
            question = json.dumps({"secret": str(secret), "folder": folder, "process": os.getpid()})
            outcome = self.run_program(PROBE, question.encode(), Limits(seconds=START_LIMIT_S))
        return judge_probe(outcome.output, outcome.error)

    @property
    def is_alive(self) -> bool:
        """A process that was killed hangs up a moment before it has ended."""
        return self._process.poll() is None and not _has_hung_up(self._control)

    def hang_up(self) -> None:
        self._control.close()

    def close(self) -> None:
        """End every program and the zygote."""
        self.hang_up()
        try:
            self._process.wait(KILL_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run_tests(
        self, code: str, tests: Sequence[str], setup: str, entry_points: Sequence[str], limits: Limits, stop: bool
    ) -> list[dict[str, Any]]:
        """
        Args:
            stop: at the first test that fails.

        Returns:
            What `judge.Judge` reports, with `{"ended": exit code}` if the program ended by itself and
            `{"timed_out": True}` at the end if time was over.

        Raises:
            SandboxEnded: the zygote is gone.
        """
        content = {"setup": setup, "tests": list(tests), "entry_points": list(entry_points), "stop_at_first": stop}
        deadline = time.monotonic() + limits.seconds
        reports: list[dict[str, Any]] = []
        with _Job() as job, _Memory(json.dumps(content).encode()) as asked, _Memory(_encoded(code)) as program:
            self._order("tests", limits, [job.theirs.fileno(), asked.number, program.number])
            job.hand_over()
            while (report := job.next_report(deadline)) is not None:
                reports.append(report)
                if "done" in report:
                    break
            else:
                if not job.is_over:
                    reports.append({"timed_out": True})
        self._raise_if_cut_off(job, reports)
        return reports

    def run_program(self, code: str, stdin: bytes, limits: Limits) -> ProgramOutcome:
        """
        Raises:
            SandboxEnded: the zygote is gone.
        """
        began = time.monotonic()
        deadline = began + limits.seconds
        with _Job() as job, _Memory(stdin) as given, _Memory(_encoded(code)) as program, _Output() as output:
            self._order(
                "program",
                limits,
                [job.theirs.fileno(), program.number, given.number, output.ends[0], output.ends[1]],
            )
            job.hand_over()
            output.hand_over()
            is_whole = output.read(deadline, limits.output_bytes)
            reports: list[dict[str, Any]] = []
            if is_whole:
                while (report := job.next_report(deadline)) is not None:
                    reports.append(report)
        self._raise_if_cut_off(job, reports)
        ended = next((report["ended"] for report in reports if "ended" in report), None)
        return ProgramOutcome(
            output=bytes(output.printed),
            error=bytes(output.complained).decode(errors="replace"),
            exit_code=ended,
            has_timed_out=ended is None and not output.is_too_much,
            has_printed_too_much=output.is_too_much,
            seconds=time.monotonic() - began,
        )

    def _order(self, kind: str, limits: Limits, descriptors: Sequence[int]) -> None:
        order = {"kind": kind, "seconds": limits.seconds, "memory_bytes": limits.memory_mib * 2**20}
        try:
            socket.send_fds(self._control, [json.dumps(order).encode()], descriptors)
        except OSError as error:
            raise SandboxEnded(f"the sandbox has ended: {error}") from None

    def _raise_if_cut_off(self, job: "_Job", reports: Sequence[dict[str, Any]]) -> None:
        """What is killed from outside says nothing about the program."""
        if why := next((report["not_started"] for report in reports if "not_started" in report), None):
            raise RewardError(f"the sandbox cannot start a process: {why}")
        if {"tests_ended": TESTS_NOT_BEGUN} in reports:
            raise RewardError("the sandbox cannot begin with tests; see whether the node is out of memory")
        if (job.was_cut_off and {"done": True} not in reports) or {"tests_ended": -signal.SIGKILL} in reports:
            raise SandboxEnded(
                "a process of the sandbox was killed from outside; see whether the node is out of memory"
            )


class _Job:
    """This end of a job. Leaving it kills what is left of the job, and waits for that."""

    def __enter__(self) -> "_Job":
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.is_over = False
        """The zygote hung up: every process has ended."""
        self._is_accounted_for = False
        return self

    @property
    def was_cut_off(self) -> bool:
        """It ended, and the zygote did not say how."""
        return self.is_over and not self._is_accounted_for

    def hand_over(self) -> None:
        self.theirs.close()

    def next_report(self, deadline: float) -> dict[str, Any] | None:
        """None at the deadline, or when the job is over."""
        if not _readable(self.ours, deadline):
            return None
        try:
            packet = self.ours.recv(MAX_PACKET_BYTES)
        except ConnectionError:
            packet = b""
        if not packet:
            self.is_over = True
            return None
        report = json.loads(packet)
        self._is_accounted_for |= not report.keys().isdisjoint({"ended", "tests_ended", "not_started"})
        return report

    def __exit__(self, *error: object) -> None:
        self.theirs.close()
        with self.ours, suppress(OSError):
            self.ours.shutdown(socket.SHUT_WR)
            give_up = time.monotonic() + KILL_LIMIT_S
            while not self.is_over and time.monotonic() < give_up:
                self.next_report(give_up)


class _Memory:
    """A file without a name for a process to read."""

    def __init__(self, content: bytes) -> None:
        self.number = os.memfd_create("towline")
        with os.fdopen(self.number, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(self.number, 0, os.SEEK_SET)

    def __enter__(self) -> "_Memory":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.number)


class _Output:
    """What a program prints: bounded while it is read."""

    def __init__(self) -> None:
        self.printed, self.complained = bytearray(), bytearray()
        self._num_complained = 0
        self.is_too_much = False

    def __enter__(self) -> "_Output":
        (self._out, out), (self._err, err) = os.pipe(), os.pipe()
        self.ends = [out, err]
        return self

    def hand_over(self) -> None:
        while self.ends:
            os.close(self.ends.pop())

    def __exit__(self, *error: object) -> None:
        self.hand_over()
        os.close(self._out)
        os.close(self._err)

    def read(self, deadline: float, max_bytes: int) -> bool:
        """Until the program has closed both; False if time is over or there is too much of it.

        Args:
            max_bytes: of output, where as many blanks more may follow; and of complaints.
        """
        poll = select.poll()
        left = {self._out, self._err}
        for descriptor in left:
            poll.register(descriptor, select.POLLIN)
        while left:
            for descriptor, _ in poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                piece = os.read(descriptor, 2**16)
                if not piece:
                    poll.unregister(descriptor)
                    left.discard(descriptor)
                elif descriptor == self._out:
                    self.printed += piece
                else:
                    self._num_complained += len(piece)
                    self.complained = (self.complained + piece)[-MAX_ERROR_BYTES:]
            is_beyond = len(self.printed) > max_bytes
            is_beyond = is_beyond and (len(self.printed) > 2 * max_bytes or bool(self.printed[max_bytes:].strip()))
            self.is_too_much = is_beyond or self._num_complained > max_bytes
            if self.is_too_much or time.monotonic() >= deadline:
                return False
        return True


def _encoded(code: str) -> bytes:
    return code.encode(errors="surrogatepass")


def _has_hung_up(found: socket.socket) -> bool:
    poll = select.poll()
    poll.register(found, select.POLLRDHUP)
    return bool(poll.poll(0))


def _readable(found: socket.socket, deadline: float) -> bool:
    poll = select.poll()
    poll.register(found, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))


_lock = threading.Lock()
_own: dict[bool, Sandbox] = {}
"""This process's, by whether it may be without walls."""


def sandbox(*, allow_unsandboxed: bool = False) -> Sandbox:
    """This process's sandbox, started if there is none yet, or it ended; after a fork the copy gets its own.

    Raises:
        IsolationError: this machine has no walls, and they are asked for.
    """
    with _lock:
        found = _own.get(allow_unsandboxed)
        if found is None or not found.is_alive:
            if found is not None:
                found.close()
            found = _own[allow_unsandboxed] = open_sandbox(allow_unsandboxed=allow_unsandboxed)
        return found


def _after_fork() -> None:
    """What belongs to our parent ends with our parent: do not hold its line open."""
    global _lock
    _lock = threading.Lock()
    for found in _own.values():
        found.hang_up()
    _own.clear()


os.register_at_fork(after_in_child=_after_fork)


def try_sandbox(*, allow_unsandboxed: bool = False) -> Isolation:
    """What `open_sandbox` finds on this machine; nothing is left running.

    Raises:
        IsolationError: as it does.
    """
    found = open_sandbox(allow_unsandboxed=allow_unsandboxed)
    found.close()
    return found.isolation


def open_sandbox(*, allow_unsandboxed: bool = False, start: Callable[..., Sandbox] = Sandbox) -> Sandbox:
    """One with the best walls that this machine has, each tried by doing what it is to prevent.

    Raises:
        IsolationError: none holds, and one is asked for.
    """
    why: list[str] = []
    tries = [(files, True) for files in FILES]
    if allow_unsandboxed:
        tries += [(NO_FILES, True), (NO_FILES, False)]
    for files, seccomp in tries:
        try:
            found = start(files=files, seccomp=seccomp)
        except IsolationError as error:
            why.append(str(error))
            continue
        if found.isolation.is_whole or (allow_unsandboxed and files == NO_FILES):
            return found
        why.append(f"{found.isolation}: {', '.join(found.isolation.failures)}")
        found.close()
    raise IsolationError(
        f"programs cannot be shut in on this machine ({'; '.join(why)}). Use nodes with Linux 5.13 or newer and "
        "landlock switched on, or where users may have namespaces (sysctl user.max_user_namespaces); or, if you trust "
        "what the model writes, set allow_unsandboxed = true"
    )
