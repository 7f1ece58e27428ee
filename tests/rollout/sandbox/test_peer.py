"""The talk between two ends: questions within questions, and an end that says what is no message."""

import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from towline.rollout.sandbox.peer import CARRIED, Peer, PeerGone, carried_exception, describe_exception
from towline.rollout.sandbox.values import MAX_MESSAGE_BYTES, pack


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def nobody_asks(request: dict[str, Any]) -> dict[str, Any]:
    raise AssertionError(request)


def until_gone(peer: Peer) -> None:
    with pytest.raises(PeerGone):
        peer.serve_for_ever()


def framed(content: bytes) -> bytes:
    return struct.pack("!I", len(content)) + content


def test_who_is_asked_may_ask_back_before_it_answers(ends: tuple[socket.socket, socket.socket]) -> None:
    def halve(request: dict[str, Any]) -> dict[str, Any]:
        number = request["number"]
        return {"steps": 0 if number <= 1 else 1 + there.ask({"number": number // 2})["steps"]}

    def also_halve(request: dict[str, Any]) -> dict[str, Any]:
        number = request["number"]
        return {"steps": 0 if number <= 1 else 1 + here.ask({"number": number // 2})["steps"]}

    here, there = Peer(ends[0].fileno(), also_halve), Peer(ends[1].fileno(), halve)
    thread = threading.Thread(target=until_gone, args=[there])
    thread.start()
    assert here.ask({"number": 64}) == {"steps": 6}
    assert here.ask({"number": 1}) == {"steps": 0}
    ends[0].shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "ended"),
        (b"\0\0", "ended"),
        (struct.pack("!I", 10) + b"{}", "ended"),
        (struct.pack("!I", 2**32 - 1), f"sent a value of more than {MAX_MESSAGE_BYTES:,} bytes"),
        (struct.pack("!I", MAX_MESSAGE_BYTES + 1), f"sent a value of more than {MAX_MESSAGE_BYTES:,} bytes"),
        (framed(b""), "no message: JSONDecodeError"),
        (framed(b"[1]"), "no message: not an object"),
        (framed(b"{" * 50_000), "no message: JSONDecodeError"),
        (framed(b'{"reply":' + b"[" * 50_000), "no message: RecursionError"),
        (framed(b'{"reply": NaN}'), "no message: NotPlain"),
        (framed(b'{"reply": 5}'), "sent no proper reply"),
        (framed(b'{"reply": null}'), "sent no proper reply"),
        (b"GET / HTTP/1.1\r\n\r\n", f"sent a value of more than {MAX_MESSAGE_BYTES:,} bytes"),
    ],
    ids=range(13),
)
def test_what_is_no_reply_ends_the_talk_for_good(
    ends: tuple[socket.socket, socket.socket], sent: bytes, why: str
) -> None:
    here = Peer(ends[0].fileno(), nobody_asks)
    ends[1].sendall(sent)
    ends[1].shutdown(socket.SHUT_WR)
    with pytest.raises(PeerGone, match=f"^{why}"):
        here.ask({"do": "load"})
    assert here.why_gone.startswith(why)
    first = here.why_gone
    with pytest.raises(PeerGone):
        here.ask({"do": "load"})
    assert here.why_gone == first


def test_whoever_sends_much_is_answered_as_much(ends: tuple[socket.socket, socket.socket]) -> None:
    text = "x" * (MAX_MESSAGE_BYTES + 1000)
    here = Peer(ends[0].fileno(), nobody_asks)
    there = Peer(ends[1].fileno(), lambda request: {"echo": request["text"]}, max_bytes=2**32)
    thread = threading.Thread(target=until_gone, args=[there])
    thread.start()
    assert here.ask({"text": text}) == {"echo": text}
    ends[0].shutdown(socket.SHUT_RDWR)
    thread.join()
    ends[1].shutdown(socket.SHUT_RDWR)


def test_an_end_that_hung_up_is_gone_when_written_to(ends: tuple[socket.socket, socket.socket]) -> None:
    here = Peer(ends[0].fileno(), nobody_asks)
    ends[1].close()
    with pytest.raises(PeerGone, match="ended"):
        here.send({"reply": {}})


def test_no_except_for_exceptions_catches_that_an_end_is_gone() -> None:
    assert not issubclass(PeerGone, Exception)


@pytest.mark.parametrize("name", sorted(CARRIED))
def test_built_in_exceptions_arrive_as_themselves(name: str) -> None:
    error = carried_exception(describe_exception(CARRIED[name]("why")))
    assert type(error) is CARRIED[name]
    assert "why" in str(error)


def test_own_exceptions_arrive_as_the_nearest_built_in_one() -> None:
    class Empty(LookupError):
        pass

    class EmptyStack(Empty):
        pass

    error = carried_exception(describe_exception(EmptyStack("nothing there")))
    assert type(error) is LookupError
    assert str(error) == "EmptyStack: nothing there"
    assert str(carried_exception(describe_exception(ValueError()))) == ""


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_what_would_end_the_tests_does_not_arrive_as_that(kind: type[BaseException]) -> None:
    error = carried_exception(describe_exception(kind(0)))
    assert type(error) is RuntimeError
    assert str(error) == f"{kind.__name__}: 0"


def test_an_exception_that_cannot_say_why_is_described_without_it() -> None:
    class Mute(ValueError):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert describe_exception(Mute()) == {
        "raised": ["Mute", "ValueError", "Exception", "BaseException", "object"],
        "message": "",
    }
    assert len(describe_exception(ValueError("x" * 10**6))["message"]) == 1000


@pytest.mark.parametrize(
    "reply",
    [
        *({"raised": 5}, {"raised": None}, {"raised": []}, {"raised": {"ValueError": 1}}, {"raised": [5, None]}),
        *({"raised": ["PeerGone"]}, {"raised": ["TestFault"]}, {"raised": ["eval"]}, {"raised": "ValueError"}),
        *({"raised": ["ExceptionGroup"], "message": ["a"]}, {"raised": ["UnicodeDecodeError"], "message": 5}),
    ],
    ids=range(11),
)
def test_no_description_makes_anything_but_a_built_in_exception(reply: dict[str, Any]) -> None:
    assert type(carried_exception(reply)) is RuntimeError


def test_a_message_is_sent_in_one_frame(ends: tuple[socket.socket, socket.socket]) -> None:
    Peer(ends[0].fileno(), nobody_asks).send({"text": "é\udcff"})
    assert ends[1].recv(1000) == framed(pack({"text": "é\udcff"})) == framed(b'{"text":"\\u00e9\\udcff"}')
