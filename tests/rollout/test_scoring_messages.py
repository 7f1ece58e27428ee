import math

import pytest

from towline.rollout.scoring_messages import LENGTH, pack, read_score, score_fields, take_whole
from towline.storage.records import Score, ScoreStatus


def test_messages_come_out_whole_however_they_arrive() -> None:
    messages = [{"number": 1, "text": "\ud800 \0 é \u2028"}, {}, {"nan": [1.5, None]}]
    stream = b"".join(map(pack, messages))
    received, found = bytearray(), []
    for byte in stream:
        received.append(byte)
        found += take_whole(received)
    assert (found, received) == (messages, b"")
    received += stream + stream[:7]
    assert (take_whole(received), received) == (messages, stream[:7])


@pytest.mark.parametrize("stream", [LENGTH.pack(2**31), LENGTH.pack(2) + b"[]", LENGTH.pack(2) + b"{a", b"x" * 10])
def test_what_is_no_message_is_refused(stream: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - json's own comes out as well
        take_whole(bytearray(stream))


def test_a_score_is_the_same_on_the_other_side() -> None:
    score = Score(
        parts={"a": 1.0, "b": 0.25},
        part_status={"a": ScoreStatus.OK, "b": ScoreStatus.TIMEOUT},
        part_seconds={"a": 0.125, "b": 5.0},
        total=1.25,
        status=ScoreStatus.TIMEOUT,
        seconds=5.125,
        detail="b: slow",
    )
    (fields,) = take_whole(bytearray(pack(score_fields(score))))
    assert read_score(fields) == score
    failed = read_score(take_whole(bytearray(pack(score_fields(_failed(score)))))[0])
    assert math.isnan(failed.total)


def _failed(score: Score) -> Score:
    fields = score_fields(score) | {"total": math.nan}
    return read_score(fields)
