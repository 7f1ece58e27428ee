"""Score completions in warm worker processes that can be killed.

    with ScoringPool(rewards, num_workers=4, limit_s=5.0, folder=folder) as pool:
        scores = pool.score_many((completion.text, prompt.answer) for ...)    # in the order of the items
        print(pool.latency(), pool.slowest)

A reward function can loop for ever, hold the interpreter in one big multiplication, end its process or fork. None of
that can be caught inside the process, so the limit is kept here: each completion has `limit_s` of wall time from when
a free worker gets it; then the worker's whole process group is killed and the status is TIMEOUT. A worker that ends by
itself is replaced and its completion tried once more, then FAILED. Neither ever becomes a 0.

Not for several threads at once. A process that a reward function moves out of the worker's group (`setsid`) escapes
the kill.
"""

import hashlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import towline
from towline.rollout.rewards.config import RewardConfig
from towline.rollout.scoring_worker import LENGTH, pack
from towline.storage.errors import ConfigError
from towline.storage.records import Score, ScoreStatus

START_LIMIT_S = 120.0
"""For loading the rewards from a cold parallel file system; no part of any completion's limit."""
ORPHAN_GRACE_S = 10.0
"""How long past the limit a busy worker may outlive a parent that can no longer kill it."""
MAX_TRIES = 2
MAX_CACHED = 20_000
MAX_REPLY_BYTES = 2**20
TICK_S = 0.25
"""Longest wait without looking around: for workers that ended, for progress, for the caller's signals."""
INHERITED_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "TMPDIR")
"""What the interpreter of an environment module needs to start; no credentials, no ranks, no addresses."""

Item = tuple[str, str]
"""Completion, gold answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Wall time per completion, from a free worker to its answer; scores from the cache are left out."""

    num_scored: int
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowest:
    seconds: float
    status: ScoreStatus
    completion: str
    gold: str


class ScoringPool:
    def __init__(self, parts_spec: Sequence[RewardConfig], num_workers: int, limit_s: float, folder: Path) -> None:
        """Start the workers and wait until each has loaded the rewards, so that a bad reward is found here.

        Args:
            parts_spec: the `[[rewards]]` tables.
            limit_s: wall time for one completion, all parts together.
            folder: what the paths in `use` are relative to.
        """
        names = [part.part_name for part in parts_spec]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"rewards: expected one or more parts with different names, found {names}; set `name`")
        if num_workers < 1 or not 0 < limit_s < math.inf:
            raise ConfigError(f"scoring needs num_workers >= 1 and limit_s > 0, found {num_workers} and {limit_s}")
        self.code_hash = ""
        """Fingerprint of the reward code, as the workers have loaded it."""
        self.slowest: Slowest | None = None
        self._uses = [part.use for part in parts_spec]
        self._names, self._limit_s, self._num_workers = names, limit_s, num_workers
        self._setup = pack(
            {
                "rewards": [(part.use, asdict(part.term)) for part in parts_spec],
                "folder": str(folder.absolute()),
                "orphan_limit_s": limit_s + ORPHAN_GRACE_S,
            }
        )
        self._workers: list[_Worker] = []
        self._seconds = array("d")
        self._cache: OrderedDict[bytes, Score] = OrderedDict()
        self._is_closed = False
        try:
            self._fill()
            while not all(worker.is_ready for worker in self._workers):
                self._collect(())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every worker with what it started. Safe to call twice."""
        self._is_closed = True
        while self._workers:
            self._workers.pop().kill()

    def score_many(self, items: Iterable[Item], on_progress: Callable[[int, int], None] | None = None) -> list[Score]:
        """Score `(completion, gold)` pairs; the result is in their order, whichever finishes first.

        Args:
            on_progress: called with (number done, number of items) at least once a second, and at the end. What it
                raises ends the call; the pool stays usable.
        """
        assert not self._is_closed, "the pool is closed"
        work = list(items)
        scores: dict[int, Score] = {}
        waiting = deque(range(len(work)))
        deaths = [0] * len(work)
        last_report = time.monotonic()
        try:
            while len(scores) < len(work):
                self._hand_out(work, waiting, scores)
                for index, outcome in self._collect(work) if len(scores) < len(work) else ():
                    if isinstance(outcome, Score):
                        scores[index] = outcome
                        self._remember(work[index], outcome)
                        continue
                    deaths[index] += 1
                    if deaths[index] < MAX_TRIES:
                        waiting.appendleft(index)
                    else:
                        scores[index] = self._unscored(ScoreStatus.FAILED, 0.0, f"{outcome}, {MAX_TRIES} times")
                if on_progress is not None and time.monotonic() - last_report >= TICK_S:
                    on_progress(len(scores), len(work))
                    last_report = time.monotonic()
            if on_progress is not None:
                on_progress(len(scores), len(work))
        finally:
            for worker in [worker for worker in self._workers if worker.item is not None]:
                self._drop(worker)  # its answer would belong to a call that has ended
        return [scores[index] for index in range(len(work))]

    def latency(self) -> Latency | None:
        """Of all completions so far; None before the first."""
        ordered = sorted(self._seconds)
        if not ordered:
            return None
        p50_s, p99_s = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
        return Latency(num_scored=len(ordered), p50_s=p50_s, p99_s=p99_s, max_s=ordered[-1])

    def _fill(self) -> None:
        while len(self._workers) < self._num_workers:
            self._workers.append(_Worker(self._setup))

    def _drop(self, worker: "_Worker") -> str:
        self._workers.remove(worker)
        return worker.kill()

    def _hand_out(self, work: Sequence[Item], waiting: deque[int], scores: dict[int, Score]) -> None:
        """Give each free worker its next completion, and answer from the cache on the way."""
        for worker in [worker for worker in self._workers if worker.is_free and worker.has_ended()]:
            self._drop(worker)  # it died of nothing that we asked of it
        self._fill()
        free = [worker for worker in self._workers if worker.is_free]
        while waiting and free:
            index = waiting.popleft()
            completion, gold = work[index]
            cached = self._cache.get(_key(work[index]))
            if cached is not None:
                scores[index] = cached
            else:
                free.pop().give(index, pack({"number": index, "completion": completion, "gold": gold}))

    def _collect(self, work: Sequence[Item]) -> list[tuple[int, Score | str]]:
        """Wait for something to happen, at most a tick; return what became of each finished item.

        A `str` says how the worker ended. Workers that ended or ran out of time are gone from the pool afterwards.
        """
        outcomes: list[tuple[int, Score | str]] = []
        _wait_for([worker for worker in self._workers if not worker.is_free], self._limit_s)
        for worker in [worker for worker in self._workers if not worker.is_free]:
            try:
                reply = worker.exchange()
                if reply is not None:
                    self._accept(worker, reply, work, outcomes)
                elif worker.elapsed_s() > (self._limit_s if worker.is_ready else START_LIMIT_S):
                    self._give_up(worker, work, outcomes)
            except _WorkerEnded as error:
                index, how = worker.item, self._drop(worker)
                if index is None:
                    raise ConfigError(self._loading(f"{error} ({how})")) from error
                outcomes.append((index, f"{error} ({how})"))
        return outcomes

    def _accept(self, worker: "_Worker", reply: dict[str, Any], work: Sequence[Item], outcomes: list[Any]) -> None:
        if not worker.is_ready:
            if "error" in reply:
                raise ConfigError(reply["error"])
            self.code_hash, worker.is_ready = reply["code_hash"], True
            return
        index = worker.item
        assert index is not None
        if reply.get("number") != index:
            raise _WorkerEnded("the worker answered what was not asked")
        fields = reply["score"]
        statuses = {name: ScoreStatus(status) for name, status in fields["part_status"].items()}
        score = Score(**fields | {"status": ScoreStatus(fields["status"]), "part_status": statuses})
        self._measure(worker.elapsed_s(), work[index], score.status)
        worker.item = None
        outcomes.append((index, score))

    def _give_up(self, worker: "_Worker", work: Sequence[Item], outcomes: list[Any]) -> None:
        index, seconds = worker.item, worker.elapsed_s()
        self._drop(worker)
        if index is None:
            raise ConfigError(self._loading(f"nothing came within {START_LIMIT_S:g} s"))
        self._measure(seconds, work[index], ScoreStatus.TIMEOUT)
        detail = f"no answer within {self._limit_s:g} s"
        outcomes.append((index, self._unscored(ScoreStatus.TIMEOUT, seconds, detail)))

    def _loading(self, what: str) -> str:
        return f"rewards {', '.join(self._uses)}: {what} while a worker loaded them; try to import the file by hand"

    def _unscored(self, status: ScoreStatus, seconds: float, detail: str) -> Score:
        """Which part it was is not known here."""
        unknown = dict.fromkeys(self._names, math.nan)
        return Score(
            parts=unknown,
            part_status=dict.fromkeys(self._names, status),
            part_seconds=unknown,
            total=math.nan,
            status=status,
            seconds=seconds,
            detail=detail,
        )

    def _measure(self, seconds: float, item: Item, status: ScoreStatus) -> None:
        self._seconds.append(seconds)
        if self.slowest is None or seconds > self.slowest.seconds:
            self.slowest = Slowest(seconds=seconds, status=status, completion=item[0], gold=item[1])

    def _remember(self, item: Item, score: Score) -> None:
        if score.status == ScoreStatus.OK:
            self._cache[_key(item)] = score
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)


class _WorkerEnded(Exception):
    """Never leaves this file: the worker is gone, or no longer keeps to the protocol."""


class _Worker:
    """One process, its two pipes, and the item that it is busy with."""

    def __init__(self, setup: bytes) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "towline.rollout.scoring_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=_environment(),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes = (self._process.stdin, self._process.stdout)
        self.requests_fd, self.replies_fd = (pipe.fileno() for pipe in self._pipes)
        os.set_blocking(self.requests_fd, False)
        os.set_blocking(self.replies_fd, False)
        self.is_ready = False
        self.item: int | None = None
        self.unsent = setup
        self._received = bytearray()
        self._started = time.monotonic()

    @property
    def is_free(self) -> bool:
        return self.is_ready and self.item is None

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def give(self, item: int, request: bytes) -> None:
        self.item, self.unsent, self._started = item, request, time.monotonic()
        self._received.clear()

    def has_ended(self) -> bool:
        """Not `Popen.poll`: that would free the process number, and `kill` could hit somebody else's group."""
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def exchange(self) -> dict[str, Any] | None:
        """Write and read what the pipes take now; return the reply once it is whole."""
        # Asked before reading, so that a last reply still counts. The end of the pipe alone does not tell: a child
        # that the reward function forked may hold it open.
        has_ended = self.has_ended()
        try:
            if self.unsent:
                self.unsent = self.unsent[os.write(self.requests_fd, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            has_ended = True
        with suppress(BlockingIOError):
            while chunk := os.read(self.replies_fd, 65536):
                self._received += chunk
                if len(self._received) > MAX_REPLY_BYTES:
                    raise _WorkerEnded("the worker sent too much")
            has_ended = True
        reply = self._whole_reply()
        if reply is None and has_ended:
            raise _WorkerEnded("the worker ended")
        return reply

    def _whole_reply(self) -> dict[str, Any] | None:
        if len(self._received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._received)
        body = self._received[LENGTH.size :]
        if len(body) < min(length, MAX_REPLY_BYTES):
            return None
        if len(body) > length or length > MAX_REPLY_BYTES:
            raise _WorkerEnded("the worker sent no proper reply")
        self._received.clear()
        try:
            return json.loads(body)
        except ValueError as error:
            raise _WorkerEnded("the worker sent no proper reply") from error

    def kill(self) -> str:
        """End the whole process group and give the pipes back; return how the process had ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        for pipe in self._pipes:
            pipe.close()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _wait_for(workers: Sequence[_Worker], limit_s: float) -> None:
    """Sleep until a pipe can be read or written, a limit is over, or a tick has passed."""
    poll = select.poll()
    for worker in workers:
        poll.register(worker.replies_fd, select.POLLIN)
        if worker.unsent:
            poll.register(worker.requests_fd, select.POLLOUT)
    left_s = min((limit_s - worker.elapsed_s() for worker in workers if worker.is_ready), default=TICK_S)
    poll.poll(1000 * min(TICK_S, max(0.0, left_s + 0.001)))


def _environment() -> dict[str, str]:
    package_root = str(Path(towline.__path__[0]).parent)
    search = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {name: os.environ[name] for name in INHERITED_ENVIRONMENT if name in os.environ}
    one_thread = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")}
    return kept | one_thread | {"PYTHONPATH": os.pathsep.join(search), "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}


def _key(item: Item) -> bytes:
    """A digest in place of the texts, so that the cache of a long run stays small."""
    completion, gold = (text.encode("utf-8", "surrogatepass") for text in item)
    return hashlib.blake2b(LENGTH.pack(len(completion)) + completion + gold, digest_size=16).digest()
