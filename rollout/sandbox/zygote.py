"""The process whose copies run programs and their tests: `python -S -B -P -c ...`, started by `Sandbox`.

It is started fresh, small and with an empty environment, puts itself behind the walls, and is told nothing but which
files a copy shall read: tests and programs never pass through it, so that no copy inherits any. Each job has a socket;
when whoever asked hangs up, the job's processes are killed, and when all of them are gone the zygote hangs up too.
"""

import gc
import importlib
import json
import os
import posix
import select
import signal
import socket
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from towline.rollout.process_tree import adopt_orphans, children, die_with, kill_with_group
from towline.rollout.sandbox import capabilities, landlock, limits, namespaces, seccomp
from towline.rollout.sandbox.judge import Judge, rehearse
from towline.rollout.sandbox.program import add_exit_functions, run_as_main
from towline.rollout.sandbox.solution import Solution

NUM_SPARES = 2
"""Copies made ahead, so that nobody waits for them: as many as tests and their program need."""
MAX_PACKET_BYTES = 4096
MAX_DESCRIPTORS = 5
FILES, NO_FILES = ("landlock", "namespaces"), "none"
TESTS_NOT_BEGUN = 3
"""Exit code of a judge whose failure is ours: no program has been asked anything yet."""
_PRELOADED = (
    "array", "base64", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "dataclasses", "datetime",
    "decimal", "enum", "fractions", "functools", "hashlib", "heapq", "io", "itertools", "json", "math", "numbers",
    "operator", "queue", "random", "re", "statistics", "string", "struct", "textwrap", "threading", "time", "traceback",
    "typing", "unicodedata", "uuid", "zlib",
)  # fmt: skip
"""What programs import most: there in every copy."""
_SYSTEM_FILES = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime",
    "/dev/zero", "/dev/urandom",
)  # fmt: skip

_INSTALLED = ("site-packages", "dist-packages")


@dataclass
class _Job:
    socket: socket.socket
    processes: dict[int, str] = field(default_factory=dict)
    """Process id → what it is: judge, solution or program."""


@dataclass(frozen=True)
class _Spare:
    """A copy that waits to hear what it is to be."""

    pid: int
    socket: socket.socket


class Zygote:
    def __init__(self, control: socket.socket, setup: dict[str, Any]) -> None:
        self._control = control
        self._files = setup["files"]
        self._wants_filter = setup["seccomp"]
        self._filter: seccomp.Filter | None = None
        self._jobs: dict[int, _Job] = {}
        self._spares: deque[_Spare] = deque()
        self._wakes, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._own_bytes = 0
        self._template = os.getpid()

    def start(self) -> dict[str, Any]:
        """Put up the walls; says which, or why not."""
        for name in _PRELOADED:
            importlib.import_module(name)
        os.register_at_fork = posix.register_at_fork
        for _ in range(50):
            rehearse()
        self._own_bytes = limits.used_bytes()
        readable = [*map(Path, _SYSTEM_FILES), *_files_of_standard_library()]
        adopt_orphans()
        limits.confine_template()
        os.environ.clear()
        sys.set_int_max_str_digits(0)  # long numbers are right answers; time is bounded as it is
        sys.path[:] = [str(path) for path in _standard_library()]
        os.chdir("/")
        found = 0
        try:
            if self._wants_filter:
                self._filter = seccomp.Filter()
            if self._files == "landlock":
                # An import looks into the folder itself before it opens a file.
                found = landlock.confine(readable, [Path(os.devnull)], _standard_library())
            elif self._files == "namespaces":
                namespaces.confine(readable, [Path(os.devnull)])
            if self._files != NO_FILES:
                capabilities.drop()
        except OSError as error:
            return {"failed": f"{self._files}: {error.strerror or error}"}
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken)
        gc.collect()
        gc.freeze()
        return {"ready": found}

    def serve(self) -> None:
        """Until whoever started us hangs up."""
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(self._wakes, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wakes:
                    with suppress(BlockingIOError):
                        os.read(self._wakes, 4096)
                elif descriptor == self._control.fileno():
                    if not self._take_order(poll):
                        return
                else:
                    poll.unregister(descriptor)  # it hung up
                    self._kill(self._jobs[descriptor])
            for descriptor in self._reap():
                with suppress(KeyError):
                    poll.unregister(descriptor)
                self._jobs.pop(descriptor).socket.close()
            if self._jobs:
                continue  # whose processes need the processors
            with suppress(OSError):  # no more processes now; whatever wakes us next is another try
                while len(self._spares) < NUM_SPARES:
                    self._spares.append(self._make_spare())

    def _take_order(self, poll: select.poll) -> bool:
        try:
            packet, descriptors, _, _ = socket.recv_fds(self._control, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
        except ConnectionError:
            return False
        if not packet:
            return False
        order = json.loads(packet)
        job = _Job(socket.socket(fileno=descriptors[0]))
        try:
            if order["kind"] == "tests":
                self._start_tests(job, order, *descriptors)
            else:
                self._start(job, order | {"role": "program"}, descriptors[1:])
        except OSError as error:  # no more processes
            with suppress(OSError):
                job.socket.send(json.dumps({"not_started": str(error)}).encode())
            self._kill(job)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        self._jobs[job.socket.fileno()] = job
        poll.register(job.socket, select.POLLRDHUP)
        return True

    def _start_tests(self, job: _Job, order: dict[str, Any], report: int, tests: int, code: int) -> None:
        of_judge, of_solution = socket.socketpair()
        with of_judge, of_solution:
            self._start(job, order | {"role": "judge"}, [of_judge.fileno(), report, tests])
            self._start(job, order | {"role": "solution"}, [of_solution.fileno(), code])

    def _start(self, job: _Job, order: dict[str, Any], descriptors: Sequence[int]) -> None:
        while True:
            is_new = not self._spares
            spare = self._make_spare() if is_new else self._spares.popleft()
            job.processes[spare.pid] = order["role"]
            try:
                with spare.socket:
                    socket.send_fds(spare.socket, [json.dumps(order).encode()], descriptors)
                return
            except OSError:  # it was killed while it waited
                if is_new:
                    raise
                del job.processes[spare.pid]

    def _make_spare(self) -> _Spare:
        """
        Raises:
            OSError: no more processes.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            raise
        if pid == 0:
            self._become_spare(theirs)
        theirs.close()
        return _Spare(pid, ours)

    def _become_spare(self, orders: socket.socket) -> NoReturn:
        """Do all that can be done before it is known what for, then that."""
        try:
            os.setsid()
            die_with(self._template)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(nothing, number)
            _close_all_but(orders.fileno())
            if not _is_waiting(orders):
                rehearse()
            packet, descriptors, _, _ = socket.recv_fds(orders, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
            if packet:
                orders.close()
                self._carry_out(json.loads(packet), *descriptors)
        except BaseException:  # nothing is left that could hear of it
            os._exit(1)
        os._exit(0)

    def _carry_out(self, order: dict[str, Any], *descriptors: int) -> None:
        if order["role"] == "judge":
            answers, reports, tests = descriptors
            try:
                content = json.loads(_take(tests))
                self._confine(order)
            except BaseException:
                os._exit(TESTS_NOT_BEGUN)

            def report(message: dict[str, Any]) -> None:
                os.write(reports, json.dumps(message).encode())

            Judge(answers, report).run(**content)
        elif order["role"] == "solution":
            questions, code = descriptors
            program = _take(code).decode(errors="surrogatepass")
            add_exit_functions()
            self._confine(order)
            Solution(program, questions).serve()
        else:
            code, *standard = descriptors
            program = _take(code).decode(errors="surrogatepass")
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            _close_all_but()
            add_exit_functions()
            self._confine(order)
            run_as_main(program)

    def _confine(self, order: dict[str, Any]) -> None:
        """First what it may use, then what it may ask of the kernel."""
        limits.confine(order["seconds"], self._own_bytes + order["memory_bytes"])
        sys.modules["random"].seed(0)
        if self._filter is not None:
            self._filter.confine()

    def _reap(self) -> list[int]:
        """Jobs of which every process has ended."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._note_end(*ended)
        if self._filter is None:
            self._sweep()
        return [descriptor for descriptor, job in self._jobs.items() if not job.processes]

    def _note_end(self, pid: int, status: int) -> None:
        job = next((job for job in self._jobs.values() if pid in job.processes), None)
        if job is None:  # one that waited: killed by a machine out of memory, say
            for spare in [spare for spare in self._spares if spare.pid == pid]:
                self._spares.remove(spare)
                spare.socket.close()
            return
        what = job.processes.pop(pid)
        report = {"tests_ended" if what == "judge" else "ended": os.waitstatus_to_exitcode(status)}
        with suppress(OSError):
            job.socket.send(json.dumps(report).encode(), socket.MSG_DONTWAIT)
        if what != "solution":  # whom would it answer?
            self._kill(job)

    def _sweep(self) -> None:
        """Programs may start processes here: kill those of ours that are no job's."""
        known = {pid for job in self._jobs.values() for pid in job.processes} | {spare.pid for spare in self._spares}
        while left := children() - known:
            for pid in left:
                kill_with_group(pid)
            with suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass

    def end_everything(self) -> None:
        for job in self._jobs.values():
            self._kill(job)
        for spare in self._spares:
            kill_with_group(spare.pid)

    def _kill(self, job: _Job) -> None:
        for pid in job.processes:
            kill_with_group(pid)


def _is_waiting(orders: socket.socket) -> bool:
    poll = select.poll()
    poll.register(orders, select.POLLIN)
    return bool(poll.poll(0))


def _take(descriptor: int) -> bytes:
    """All of a file, which is closed."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def _close_all_but(*kept: int) -> None:
    below = 3
    for descriptor in sorted(kept):
        os.closerange(below, descriptor)
        below = descriptor + 1
    os.closerange(below, 2**16)


def _standard_library() -> list[Path]:
    """Folders and archives in which this interpreter looks for it."""
    here = Path(os.__file__).parent
    return [here, here / "lib-dynload"]


def _files_of_standard_library() -> Iterator[Path]:
    """Not what users install next to it: data sets may be there, with their answers."""
    for folder in _standard_library():
        if folder.is_dir():
            yield from (path for path in folder.iterdir() if path.name not in _INSTALLED)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    zygote = Zygote(control, json.loads(sys.argv[2]))
    said = zygote.start()
    control.send(json.dumps(said).encode())
    if "ready" in said:
        zygote.serve()
        zygote.end_everything()
    os._exit(0)
