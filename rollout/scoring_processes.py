"""The pool's ends of its processes: the template that starts workers, and each worker with what it was given."""

import json
import mmap
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import towline
from towline.rollout.scoring_messages import MAX_PACKET_BYTES, MAX_REPLY_BYTES, Message, pack, take_whole
from towline.rollout.scoring_queue import Task

END_WITHIN_S = 10.0
"""For the template to end with all its workers."""
INHERITED_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR")
"""What the interpreter of an environment module needs to start; no credentials, no ranks, no addresses."""


class TemplateEnded(Exception):
    """Never leaves the pool: template and workers are gone."""


class WorkerEnded(Exception):
    """Never leaves the pool: the worker hung up, or no longer keeps to the protocol."""


class Template:
    def __init__(self, setup: Message, num_slots: int) -> None:
        descriptor = os.memfd_create("towline-scoring")
        os.ftruncate(descriptor, num_slots)
        self._board = mmap.mmap(descriptor, num_slots)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", "towline.rollout.scoring_template"]
                + [str(argument) for argument in (theirs.fileno(), descriptor, os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints goes where errors go
                env=_environment(),
                pass_fds=(theirs.fileno(), descriptor),
                start_new_session=True,
            )
        except BaseException:
            self._socket.close()
            self._board.close()
            raise
        finally:
            theirs.close()
            os.close(descriptor)
        self._tell(setup)

    def fileno(self) -> int:
        return self._socket.fileno()

    def start_worker(self, number: int, slot: int) -> "Worker":
        self._board[slot] = 0
        ours, theirs = socket.socketpair()
        with theirs:
            packet = json.dumps({"start": number, "slot": slot}).encode()
            try:
                socket.send_fds(self._socket, [packet], [theirs.fileno()])
            except ConnectionError as error:
                ours.close()
                raise TemplateEnded from error
        return Worker(number, slot, ours)

    def end_worker(self, worker: "Worker") -> None:
        """With everything that it started. The template says when it has ended."""
        self._tell({"end": worker.number})

    def answer(self, limit_s: float) -> Message:
        """Wait for the first word of it; empty if none comes in time.

        Raises:
            TemplateEnded: it ended instead.
        """
        poll = select.poll()  # select.select takes no descriptors above 1023
        poll.register(self, select.POLLIN)
        return self.heard()[0] if poll.poll(1000 * limit_s) else {}

    def part_at_work(self, worker: "Worker") -> int:
        """Which reward the worker asked last, from 1; 0 if none yet."""
        return self._board[worker.slot]

    def heard(self) -> list[Message]:
        """What the template has said by now.

        Raises:
            TemplateEnded: there is nothing more to come.
        """
        messages: list[Message] = []
        with suppress(BlockingIOError):
            while True:
                try:
                    packet = self._socket.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
                except ConnectionError as error:
                    raise TemplateEnded from error
                if not packet:
                    if messages:
                        break
                    raise TemplateEnded
                messages.append(json.loads(packet))
        return messages

    def close(self) -> str:
        """Hang up, so that the template ends all its workers, and wait for that. Returns how it ended."""
        self._socket.close()
        self._board.close()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        code = self._process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """It no longer answers. Its workers die with it; what left their sessions is not found."""
        self._process.kill()

    def _tell(self, message: Message) -> None:
        with suppress(ConnectionError):  # it has ended: `heard` says so
            self._socket.send(json.dumps(message).encode())


class Worker:
    """One worker's socket and batch. The first item of the batch is the one that is being graded."""

    def __init__(self, number: int, slot: int, stream: socket.socket) -> None:
        self.number, self.slot = number, slot
        self._stream = stream
        stream.setblocking(False)
        self.is_ready = False
        self.batch: deque[Task] = deque()
        self.unsent = memoryview(b"")
        self.why_ending = ""
        """Not empty: it is being ended, and the batch is kept until it is known how it ended."""
        self._received = bytearray()
        self.began = time.monotonic()
        """When it was started, asked to end, or began with the first item of its batch."""

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def is_free(self) -> bool:
        return self.is_ready and not self.batch and not self.is_ending

    @property
    def is_ending(self) -> bool:
        return bool(self.why_ending)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def give(self, batch: Sequence[Task]) -> None:
        self.batch.extend(batch)
        items = [(task.ticket, *task.item) for task in batch]
        self.unsent = memoryview(pack({"items": items}))
        self.began = time.monotonic()

    def end(self, why: str) -> None:
        self.why_ending, self.began = why, time.monotonic()

    def exchange(self) -> list[Message]:
        """Write and read what the socket takes now; return the replies that are whole.

        Raises:
            WorkerEnded: it hung up, or sent what is no reply. A whole reply before that comes out first.
        """
        has_ended = False
        try:
            if self.unsent:
                self.unsent = self.unsent[self._stream.send(self.unsent) :]
        except BlockingIOError:
            pass
        except ConnectionError:
            has_ended = True
        try:
            while len(self._received) <= MAX_REPLY_BYTES:
                piece = self._stream.recv(65536)
                if not piece:
                    has_ended = True
                    break
                self._received += piece
        except BlockingIOError:
            pass
        except ConnectionError:
            has_ended = True
        try:
            messages = take_whole(self._received)
        except ValueError as error:
            raise WorkerEnded("the worker sent no proper reply") from error
        if has_ended and not messages:
            raise WorkerEnded("the worker ended")
        return messages

    def close(self) -> None:
        self._stream.close()


def _environment() -> dict[str, str]:
    package_root = str(Path(towline.__path__[0]).parent)
    search = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {name: os.environ[name] for name in INHERITED_ENVIRONMENT if name in os.environ}
    one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    return kept | one_thread | {"PYTHONPATH": os.pathsep.join(search), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
