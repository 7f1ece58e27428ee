"""The template of the scoring pool's workers: `python -P -u -m towline.rollout.scoring_template`, started by the pool.

It loads the rewards once and makes a copy of itself for each worker that the pool wants: 2 ms instead of an import. It
is the parent of all of them, kills those that the pool gives up with everything they started, and ends with the pool.
A process with threads cannot be copied safely. Where loading the rewards starts some, it says so, and started again
without rewards it starts whole processes that load them themselves.

It runs no reward function, so it always answers.
"""

import gc
import json
import mmap
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from towline.rollout.process_tree import (
    adopt_orphans,
    children,
    die_with,
    kill_with_group,
    outlive_parent,
    thread_names,
)
from towline.rollout.rewards.mixture import RewardPart, code_hash
from towline.rollout.scoring_messages import MAX_PACKET_BYTES, Message
from towline.rollout.scoring_worker import load_parts, serve
from towline.storage.errors import InputError

_SWEEP_S = 0.5
"""Longest time in a row for ending what fights back; the pool waits meanwhile."""
_LOOK_AGAIN_MS = 20
_END_WITHIN_S = 5.0


def main() -> None:
    pool, board_fd, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
    for descriptor in (pool.fileno(), board_fd):
        os.set_inheritable(descriptor, False)
    adopt_orphans()
    die_with(parent)
    setup = json.loads(pool.recv(MAX_PACKET_BYTES))
    template = _Template(pool, board_fd, setup)
    if template.load():
        outlive_parent()  # the thread that started us may end; the pool's end shows at its socket
        template.serve_pool()
    template.end_everything()
    os._exit(0)


class _Template:
    def __init__(self, pool: socket.socket, board_fd: int, setup: Message) -> None:
        self._pool, self._board_fd, self._setup = pool, board_fd, setup
        self._board = mmap.mmap(board_fd, 0)
        self._parts: list[RewardPart] | None = None
        self._workers: dict[int, int] = {}
        """Process id → the pool's number of it."""
        self._own: set[int] = set()
        """What loading the rewards started, such as a server that they ask."""
        self._wakes, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def load(self) -> bool:
        """Load the rewards, unless each worker is to do that; tell the pool how it went."""
        answer: Message = {"ready": None}
        if self._setup["forks"]:
            try:
                self._parts = load_parts(self._setup)
            except InputError as error:
                self._tell({"cannot_load": str(error)[:10_000]})
                return False
            if len(threads := thread_names()) > 1:
                self._tell({"threads": threads[1:]})
                return False
            answer["ready"] = code_hash(self._parts)
        gc.collect()
        gc.freeze()  # or the first collection in each worker would copy every page
        self._own = children()
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._woken)
        self._tell(answer)
        return True

    def serve_pool(self) -> None:
        """Until the pool hangs up."""
        poll = select.poll()
        for descriptor in (self._pool.fileno(), self._wakes):
            poll.register(descriptor, select.POLLIN)
        while True:
            poll.poll(None if self._sweep(_SWEEP_S) else _LOOK_AGAIN_MS)
            with suppress(BlockingIOError):
                os.read(self._wakes, 4096)
            self._reap()
            while (packet := self._packet()) is not None:
                if not packet[0]:
                    return
                self._obey(*packet)

    def _packet(self) -> tuple[bytes, list[int]] | None:
        """Content, and the descriptor that comes with it; None if nothing is there now."""
        try:
            # socket.recv_fds would do, if it passed its flags on (it does from Python 3.12).
            content, attached, _, _ = self._pool.recvmsg(MAX_PACKET_BYTES, socket.CMSG_SPACE(4), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionError:
            return b"", []
        return content, [int.from_bytes(number[:4], sys.byteorder) for _, _, number in attached]

    def _obey(self, content: bytes, descriptors: list[int]) -> None:
        order = json.loads(content)
        if "start" in order:
            self._start(order["start"], order["slot"], descriptors[0])
        else:
            self._end(order["end"])

    def _start(self, number: int, slot: int, descriptor: int) -> None:
        try:
            pid = self._fork(slot, descriptor) if self._parts is not None else self._spawn(slot, descriptor)
            self._workers[pid] = number
        except OSError as error:
            self._tell({"ended": number, "how": f"cannot be started: {error}"})
        os.close(descriptor)

    def _fork(self, slot: int, descriptor: int) -> int:
        template = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._become_worker(template, slot, descriptor)
        finally:
            os._exit(1)

    def _become_worker(self, template: int, slot: int, descriptor: int) -> NoReturn:
        assert self._parts is not None
        os.setsid()
        die_with(template)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._pool.close()
        for inherited in (self._wakes, self._woken, self._board_fd):
            os.close(inherited)
        serve(self._parts, socket.socket(fileno=descriptor), self._board, slot, self._setup["max_bytes"])
        os._exit(0)

    def _spawn(self, slot: int, descriptor: int) -> int:
        os.set_inheritable(descriptor, True)
        os.set_inheritable(self._board_fd, True)
        own: dict[str, Any] = {"pool_fd": descriptor, "board_fd": self._board_fd, "slot": slot, "template": os.getpid()}
        arguments = ["-P", "-u", "-m", "towline.rollout.scoring_worker", json.dumps(self._setup | own)]
        return os.posix_spawn(sys.executable, [sys.executable, *arguments], os.environ, setsid=True)

    def _end(self, number: int) -> None:
        """Kill a worker's group; what left the group is found when the worker is reaped."""
        for pid in [pid for pid, worker in self._workers.items() if worker == number]:
            kill_with_group(pid)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                self._own.discard(pid)
                if pid in self._workers:
                    self._tell({"ended": self._workers.pop(pid), "how": _how(status)})

    def _sweep(self, within_s: float) -> bool:
        """Kill what ended workers left behind: those of our children that we did not start. False: some live yet."""
        deadline = time.monotonic() + within_s
        while left := children() - self._workers.keys() - self._own:
            for pid in left:
                kill_with_group(pid)
            self._reap()
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return True

    def end_everything(self) -> None:
        for pid in self._workers:
            kill_with_group(pid)
        self._workers.clear()
        self._own.clear()
        self._sweep(_END_WITHIN_S)

    def _tell(self, message: Message) -> None:
        with suppress(ConnectionError):  # it hung up: the next read says so
            self._pool.send(json.dumps(message).encode()[:MAX_PACKET_BYTES])


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"


if __name__ == "__main__":
    main()
