"""A worker of the scoring pool: grades what the pool sends it, one completion after the other, until it is killed.

It is a copy of the template (`scoring_template.py`), or where that cannot be forked a process of its own,
`python -P -u -m towline.rollout.scoring_worker SETUP`. It keeps no time limit: that cannot be kept from inside.
A reply says that the next completion begins.
"""

import gc
import json
import mmap
import os
import resource
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from towline.rollout.process_tree import adopt_orphans, die_with
from towline.rollout.rewards.mixture import RewardPart, code_hash, load_reward, score
from towline.rollout.scoring_messages import LENGTH, Message, pack, score_fields
from towline.storage.errors import InputError, TowlineError

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def load_parts(setup: Message) -> list[RewardPart]:
    """
    Raises:
        InputError: a reward cannot be loaded.
    """
    folder = Path(setup["folder"])
    return [RewardPart(**term, function=load_reward(use, folder, options)) for use, term, options in setup["rewards"]]


def serve(parts: Sequence[RewardPart], pool: socket.socket, board: mmap.mmap, slot: int, max_bytes: int) -> None:
    """Answer until the pool hangs up. Does not return.

    Args:
        board: shared with the pool: `board[slot]` is the part that is being asked, from 1.
        max_bytes: address space beyond what is there now.
    """
    worker = os.getpid()
    adopt_orphans()  # what it starts stays below it, and is found there
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a reward function that segfaults leaves no core files
    try:
        isolation = next(filter(None, [part.prepare() for part in parts]), "")
    except TowlineError as error:
        pool.sendall(pack({"cannot_load": str(error)}))
        os._exit(1)
    memory = _Memory(max_bytes)

    def note(place: int) -> None:
        """Of a worker that is killed nothing else can be learned."""
        board[slot] = min(place, 255)

    pool.sendall(pack({"ready": code_hash(parts), "isolation": isolation}))
    while (request := _receive(pool)) is not None:
        for number, completion, gold in request["items"]:
            note(0)
            reply = _graded(parts, completion, gold, note)
            if os.getpid() != worker:
                os._exit(0)  # a reward function forked and its child came back here: it has no say
            pool.sendall(pack({"number": number, "place": board[slot], **reply}))
            if memory.is_used_up():
                pool.sendall(pack({"leaves": True}))
                os._exit(0)
    os._exit(0)  # threads and exit handlers of a reward function do not keep the worker alive


def _graded(parts: Sequence[RewardPart], completion: str, gold: str, note: Callable[[int], None]) -> Message:
    try:
        return {"score": score_fields(score(parts, completion, gold, note))}
    except BaseException as error:  # the boundary of the process: KeyboardInterrupt and its like, raised by a reward
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}


class _Memory:
    """Address space: limited for good, and looked at, so that no completion pays for what an earlier one left."""

    def __init__(self, max_bytes: int) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        begins_with = self._used_bytes()
        self._leaves_above = begins_with + max_bytes // 2
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = begins_with + max_bytes
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def is_used_up(self) -> bool:
        """Half of it is held after a completion."""
        return self._used_bytes() > self._leaves_above

    def _used_bytes(self) -> int:
        return int(os.pread(self._statm, 64, 0).split()[0]) * _PAGE_BYTES


def _receive(pool: socket.socket) -> Message | None:
    header = _exactly(pool, LENGTH.size)
    body = _exactly(pool, LENGTH.unpack(header)[0]) if header else b""
    return json.loads(body) if body else None


def _exactly(pool: socket.socket, num_bytes: int) -> bytes:
    """Empty when the pool has hung up."""
    whole = bytearray()
    while len(whole) < num_bytes:
        piece = pool.recv(min(num_bytes - len(whole), 2**18))
        if not piece:
            return b""
        whole += piece
    return bytes(whole)


def main() -> None:
    setup = json.loads(sys.argv[1])
    die_with(setup["template"])
    pool, board = socket.socket(fileno=setup["pool_fd"]), mmap.mmap(setup["board_fd"], 0)
    pool.set_inheritable(False)
    try:
        parts = load_parts(setup)
    except InputError as error:
        pool.sendall(pack({"cannot_load": str(error)}))
        return
    gc.freeze()
    serve(parts, pool, board, setup["slot"], setup["max_bytes"])


if __name__ == "__main__":
    main()
