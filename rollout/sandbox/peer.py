"""One end of the talk between tests and a program. Either may ask; who is asked may ask back before it answers."""

import builtins
import os
import struct
from collections.abc import Callable
from typing import Any

from towline.rollout.sandbox.values import MAX_MESSAGE_BYTES, Json, NotPlain, pack, unpack

_LENGTH = struct.Struct("!I")


class PeerGone(BaseException):
    """The other end hung up, or sent what is no message. Not an Exception: a test that catches those does not see
    it."""


def _carried() -> dict[str, type[Exception]]:
    """Built-in exceptions that are made of one message."""
    found: dict[str, type[Exception]] = {}
    for name, kind in vars(builtins).items():
        if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning):
            try:
                kind("message")
            except TypeError:
                continue
            found[name] = kind
    return found


CARRIED = _carried()


class Peer:
    def __init__(
        self, descriptor: int, serve: Callable[[dict[str, Any]], dict[str, Any]], max_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        """
        Args:
            descriptor: a stream socket.
            serve: answers what the other end asks.
            max_bytes: of a message that is taken, or twice the longest that was sent if that is more.
        """
        self._descriptor, self._serve, self._max_bytes = descriptor, serve, max_bytes
        self.why_gone = ""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """
        Returns:
            The reply, without an exception in it.

        Raises:
            PeerGone: there is none, now or since earlier.
        """
        self.send(request)
        while "reply" not in (message := self.receive()):
            self.send({"reply": self._serve(message)})
        return message["reply"] if isinstance(message["reply"], dict) else self._end("sent no proper reply")

    def serve_for_ever(self) -> None:
        """Until the other end hangs up.

        Raises:
            PeerGone: it did.
        """
        while True:
            self.send({"reply": self._serve(self.receive())})

    def send(self, message: Json) -> None:
        content = pack(message)
        self._max_bytes = max(self._max_bytes, 2 * len(content))
        left = memoryview(_LENGTH.pack(len(content)) + content)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            self._end("ended")

    def receive(self) -> dict[str, Any]:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > self._max_bytes:
            self._end(f"sent a value of more than {self._max_bytes:,} bytes")
        try:
            return unpack(self._exactly(length))
        except NotPlain as error:
            return self._end(str(error))

    def _exactly(self, num_bytes: int) -> bytes:
        whole = bytearray()
        while len(whole) < num_bytes:
            try:
                piece = os.read(self._descriptor, min(num_bytes - len(whole), 2**18))
            except OSError:
                piece = b""
            if not piece:
                self._end("ended")
            whole += piece
        return bytes(whole)

    def _end(self, why: str) -> Any:
        self.why_gone = self.why_gone or why
        raise PeerGone(self.why_gone)


def describe_exception(error: BaseException) -> dict[str, Any]:
    """What the other end is told of it: names of its classes up to the first that it knows, and its message."""
    names = [kind.__name__ for kind in type(error).__mro__]
    try:
        message = _message(error)[:1000]
    except Exception:  # `__str__` of the program's own class
        message = ""
    return {"raised": names, "message": message}


def _message(error: BaseException) -> str:
    if isinstance(error, KeyError) and len(error.args) == 1 and type(error.args[0]) is str:
        return error.args[0]  # its text has quotes around it, and would get them once more
    return str(error)


def carried_exception(reply: dict[str, Any]) -> Exception:
    """The nearest built-in exception to the one that the other end describes."""
    names, message = reply.get("raised"), reply.get("message")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    kind = next((CARRIED[name] for name in names if name in CARRIED), RuntimeError)
    own = names[0] if names else "an exception"
    text = message if isinstance(message, str) else ""
    if own != kind.__name__:
        text = f"{own}: {text}"[:1000]
    return kind(*([text] if text else []))
