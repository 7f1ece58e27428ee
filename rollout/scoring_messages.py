"""What pool, template and workers say to each other: JSON, so that nothing in it is ever executed.

Between pool and worker it goes over a stream, each message after its length: no message can be read as another one.
Between pool and template it goes in packets.
"""

import json
import struct
from dataclasses import dataclass
from typing import Any

from towline.storage.records import Score, ScoreStatus

LENGTH = struct.Struct("!I")
MAX_REPLY_BYTES = 2**20
MAX_PACKET_BYTES = 2**16
Message = dict[str, Any]


def pack(message: Message) -> bytes:
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def take_whole(received: bytearray) -> list[Message]:
    """Remove the whole messages from the front of what was received, and return them.

    Raises:
        ValueError: these are no messages.
    """
    messages: list[Message] = []
    start = 0
    while len(received) - start >= LENGTH.size:
        (length,) = LENGTH.unpack_from(received, start)
        if length > MAX_REPLY_BYTES:
            raise ValueError(f"a message of {length} bytes")
        end = start + LENGTH.size + length
        if len(received) < end:
            break
        message = json.loads(received[start + LENGTH.size : end])
        if not isinstance(message, dict):
            raise ValueError("a message that is no object")
        messages.append(message)
        start = end
    del received[:start]
    return messages


def score_fields(score: Score) -> Message:
    return {
        "parts": score.parts,
        "part_status": score.part_status,
        "part_seconds": score.part_seconds,
        "total": score.total,
        "status": score.status,
        "seconds": score.seconds,
        "detail": score.detail,
    }


def read_score(fields: Message) -> Score:
    statuses = {name: ScoreStatus(status) for name, status in fields["part_status"].items()}
    return Score(**fields | {"status": ScoreStatus(fields["status"]), "part_status": statuses})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one item."""

    ticket: int
    score: Score
    is_cached: bool = False
    """It was scored earlier, and its times are of then."""
