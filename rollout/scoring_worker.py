"""A worker of the scoring pool: `python -P -u -m towline.rollout.scoring_worker`, started by `towline.rollout.scoring`.

It takes the pipes away from standard input and output, so that a reward function may print and read as it likes, then
answers one request after the other: first the rewards to load, then `(number, completion, gold)` each. It keeps no
time limit of its own worth the name: the parent kills it.
"""

import json
import os
import resource
import signal
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from towline.rollout.rewards.mixture import RewardPart, code_hash, load_reward, score
from towline.storage.errors import InputError

LENGTH = struct.Struct("!I")


def pack(message: dict[str, Any]) -> bytes:
    """Length-prefixed JSON: no message can be read as another one, and nothing in it is ever executed."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def main() -> None:
    requests, replies = _take_over_standard_streams()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a reward function that segfaults leaves no core files
    setup = _receive(requests)
    if setup is not None:
        _serve(setup, requests, replies)
    os._exit(0)  # threads and exit handlers of a reward function do not keep the worker alive


def _serve(setup: dict[str, Any], requests: BinaryIO, replies: BinaryIO) -> None:
    worker = os.getpid()
    folder = Path(setup["folder"])
    try:
        parts = [RewardPart(**term, function=load_reward(use, folder)) for use, term in setup["rewards"]]
    except InputError as error:
        _send(replies, {"error": str(error)})
        return
    _send(replies, {"code_hash": code_hash(parts)})
    while (request := _receive(requests)) is not None:
        # Only for when the parent is gone and nobody is left to kill: the kernel does, whatever holds the interpreter.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, setup["orphan_limit_s"])
        result = score(parts, request["completion"], request["gold"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() != worker:
            os._exit(0)  # a reward function forked and its child came back here: it has no say
        _send(replies, {"number": request["number"], "score": asdict(result)})


def _take_over_standard_streams() -> tuple[BinaryIO, BinaryIO]:
    """Keep the two pipes for ourselves; standard input becomes empty, standard output goes where errors go."""
    requests = os.fdopen(os.dup(0), "rb")  # os.dup gives descriptors that no started program inherits
    replies = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return requests, replies


def _receive(requests: BinaryIO) -> dict[str, Any] | None:
    header = requests.read(LENGTH.size)
    if len(header) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(header)
    body = requests.read(length)
    return json.loads(body) if len(body) == length else None


def _send(replies: BinaryIO, message: dict[str, Any]) -> None:
    replies.write(pack(message))
    replies.flush()


if __name__ == "__main__":
    main()
