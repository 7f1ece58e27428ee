"""Score over the ranks of an MPI communicator: rank 0 hands items out, every rank has a pool of its own.

    with ScorerGroup(MPI.COMM_WORLD, lambda: ScoringPool(rewards, ...)) as group:    # on every rank
        if group.is_first:
            scores = group.score_many(items)
        else:
            group.serve()                                                            # until rank 0 leaves the block

A rank gets more when it has given some back, so a slow item holds up nobody else. What fails on one rank is an error
on all of them. Importing this initialises MPI. Ranks talk in JSON and look for messages now and then: MPI's own waits
would take a core each from the workers.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from mpi4py import MPI

from towline.rollout.score_call import OnProgress, ScoreCall, item_number
from towline.rollout.score_timings import ScoreTimings
from towline.rollout.scoring import ScoringPool
from towline.rollout.scoring_messages import Message, Outcome, read_score, score_fields
from towline.rollout.scoring_queue import MAX_BATCH, MAX_QUEUED_CHARS, Item, Pace
from towline.storage.errors import ConfigError, RewardError
from towline.storage.records import Score

POLL_S = 0.002
AHEAD_S = 0.05
"""Each worker of each rank has items for about as long as this; slow ones, one at a time."""

_ELSEWHERE = "another rank ended the scoring: "


class ScorerGroup:
    def __init__(self, ranks: MPI.Intracomm, make_pool: Callable[[], ScoringPool]) -> None:
        """Make the pools; every rank calls it.

        Raises:
            ConfigError: on every rank, if a pool cannot be made on one of them, or their reward code differs.
        """
        self._ranks = ranks
        self.timings = ScoreTimings()
        """On rank 0."""
        self._sends: list[tuple[MPI.Request, bytes]] = []
        self._under_way: list[dict[int, int]] = [{} for _ in range(ranks.size)]
        """Of each rank: ticket → characters."""
        self._pace = Pace(AHEAD_S)
        self._call = 0
        self._is_told_to_leave = False
        self._is_closed = False
        pool, error = None, ""
        try:
            pool = make_pool()
            self.code_hash, num_workers = pool.code_hash, pool.num_workers
        except Exception as raised:  # the boundary between ranks: they all wait to hear how it went
            error, num_workers, self.code_hash = f"{type(raised).__name__}: {raised}", 0, ""
        found: list[tuple[str, str, int]] = ranks.allgather((error, self.code_hash, num_workers))
        problems = _by_rank([error for error, _, _ in found])
        if not problems and len({code_hash for _, code_hash, _ in found}) > 1:
            problems = [f"rank {rank} has reward code {code_hash[:8]}" for rank, (_, code_hash, _) in enumerate(found)]
        if pool is None or problems:
            if pool is not None:
                pool.close()
            raise ConfigError("; ".join(problems))
        self._pool = pool
        self.why_slow_starts, self.isolation = pool.why_slow_starts, pool.isolation
        self._num_workers = [num_workers for _, _, num_workers in found]

    @property
    def is_first(self) -> bool:
        return self._ranks.rank == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close("" if error is None else self._described(error))

    def _described(self, error: BaseException) -> str:
        own = f"rank {self._ranks.rank}: {type(error).__name__}: {error}"
        return str(error) if str(error).startswith(_ELSEWHERE) else own

    def close(self, failure: str = "") -> None:
        """Leave together: rank 0 says when, the others have said so, and no message is left behind. Safe to call twice.

        Args:
            failure: why, if it is no ordinary end.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._pool.close()
        others = range(1, self._ranks.size)
        if self.is_first:
            for rank in others:
                self._send(rank, {"leave": failure})
            left = set(others)
            while left:
                message, rank = self._wait_for_message()
                left -= {rank} if "left" in message else set()
        else:
            if not self._is_told_to_leave:
                self._send(0, {"failed": failure or "it left by itself"})
                while "leave" not in self._wait_for_message()[0]:
                    pass
            self._send(0, {"left": True})
        MPI.Request.Waitall([request for request, _ in self._sends])
        self._sends.clear()

    def score_many(
        self, items: Iterable[Item], on_progress: OnProgress | None = None, where: Callable[[int], str] = item_number
    ) -> list[Score]:
        """On rank 0; as `ScoringPool.score_many`.

        Raises:
            RewardError: a rank failed; so do the others.
        """
        assert self.is_first, "rank 0 scores, the others serve"
        self._call += 1
        call = ScoreCall(items, self.timings, on_progress, where)
        try:
            while not call.is_done:
                self._hand_out(call)
                for outcome in self._collect():
                    call.note(outcome)
                call.report()
        except BaseException:
            self._abandon()
            raise
        return call.scores()

    def serve(self) -> None:
        """On the other ranks: grade what rank 0 sends, until it leaves.

        Raises:
            RewardError: another rank failed.
        """
        call = 0
        while True:
            while (received := self._receive()) is not None:
                message, _ = received
                if "leave" in message:
                    self._is_told_to_leave = True
                    if message["leave"]:
                        raise RewardError(_elsewhere(message["leave"]))
                    return
                if message["call"] != call:
                    self._pool.abandon()
                    call = message["call"]
                for ticket, completion, gold in message["items"]:
                    self._pool.submit(ticket, (completion, gold))
            if outcomes := self._pool.collect(POLL_S):
                self._send(0, {"call": call, "outcomes": [_fields(outcome) for outcome in outcomes]})
            elif self._pool.is_idle:
                time.sleep(POLL_S)

    def _hand_out(self, call: ScoreCall) -> None:
        """To the ranks in turn, whoever has room, so that the first do not get everything."""
        batches: list[list[tuple[int, str, str]]] = [[] for _ in self._under_way]
        has_room = True
        while has_room and call.has_more:
            has_room = False
            for rank, under_way in enumerate(self._under_way):
                if not self._has_room(rank) or (taken := call.take()) is None:
                    continue
                ticket, item = taken
                under_way[ticket] = len(item[0]) + len(item[1])
                batches[rank].append((ticket, *item))
                has_room = True
        for ticket, completion, gold in batches[0]:
            self._pool.submit(ticket, (completion, gold))
        for rank, batch in enumerate(batches):
            if rank > 0 and batch:
                self._send(rank, {"call": self._call, "items": batch})

    def _has_room(self, rank: int) -> bool:
        under_way = self._under_way[rank]
        is_long = len(under_way) >= self._num_workers[rank] * min(MAX_BATCH, self._pace.num_within)
        return not is_long and sum(under_way.values()) < MAX_QUEUED_CHARS

    def _collect(self) -> list[Outcome]:
        outcomes = self._pool.collect(POLL_S)
        for outcome in outcomes:
            del self._under_way[0][outcome.ticket]
        while (received := self._receive()) is not None:
            message, rank = received
            if "failed" in message:
                raise RewardError(_elsewhere(message["failed"]))
            if message["call"] != self._call:  # of a call that was given up
                continue
            for fields in message["outcomes"]:
                outcomes.append(_outcome(fields))
                del self._under_way[rank][outcomes[-1].ticket]
        for outcome in outcomes:
            if not outcome.is_cached:
                self._pace.note(outcome.score.seconds)
        if not outcomes and self._pool.is_idle:
            time.sleep(POLL_S)
        return outcomes

    def _abandon(self) -> None:
        self._pool.abandon()
        self._call += 1
        for rank, under_way in enumerate(self._under_way):
            under_way.clear()
            if rank > 0:
                self._send(rank, {"call": self._call, "items": []})

    def _send(self, rank: int, message: Message) -> None:
        self._sends = [(request, body) for request, body in self._sends if not request.Test()]
        body = json.dumps(message).encode()
        self._sends.append((self._ranks.Isend([body, MPI.BYTE], dest=rank), body))

    def _receive(self) -> tuple[Message, int] | None:
        """A message and the rank that it is of; None if there is none."""
        status = MPI.Status()
        arrived: Any = self._ranks.Improbe(status=status)
        if arrived is None:
            return None
        body = bytearray(status.Get_count(MPI.BYTE))
        arrived.Recv([body, MPI.BYTE])
        return json.loads(body), status.Get_source()

    def _wait_for_message(self) -> tuple[Message, int]:
        while (received := self._receive()) is None:
            time.sleep(POLL_S)
        return received


def _by_rank(errors: Sequence[str]) -> list[str]:
    """What went wrong, once for all ranks that say the same; a rank where nothing did says nothing."""
    ranks: dict[str, list[str]] = {}
    for rank, error in enumerate(errors):
        ranks.setdefault(error, []).append(str(rank))
    return [f"rank{'s'[: len(who) - 1]} {', '.join(who)}: {error}" for error, who in ranks.items() if error]


def _elsewhere(failure: str) -> str:
    return failure if failure.startswith(_ELSEWHERE) else f"{_ELSEWHERE}{failure}"


def _fields(outcome: Outcome) -> tuple[int, Message, bool]:
    return outcome.ticket, score_fields(outcome.score), outcome.is_cached


def _outcome(fields: tuple[int, Message, bool]) -> Outcome:
    ticket, score, is_cached = fields
    return Outcome(ticket=ticket, score=read_score(score), is_cached=is_cached)
