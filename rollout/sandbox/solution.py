"""The program's end of the talk: it is loaded as a module, and its functions are called with what tests send."""

import operator
import sys
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import Any

from towline.rollout.sandbox.peer import Peer, carried_exception, describe_exception
from towline.rollout.sandbox.values import MAX_SENT_DEPTH, Json, decode, encode

NAME = "solution"
_ASKED: dict[str, Callable[..., Any]] = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "attribute": getattr,
    "set_attribute": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "item": operator.getitem,
    "bool": bool,
    "str": str,
    "repr": repr,
}


class Solution:
    def __init__(self, code: str, descriptor: int) -> None:
        self._code = code
        self._peer = Peer(descriptor, self._serve, max_bytes=2**32)  # what tests send is not to be bounded
        self._module = ModuleType(NAME)
        self._exported: list[object] = []
        self._numbers: dict[int, int] = {}
        """id of what was exported (and lives since) → its number."""

    def serve(self) -> None:
        """Load the program when asked to, answer until the tests are done."""
        self._peer.serve_for_ever()

    def _serve(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            match request["do"]:
                case "load":
                    return self._load()
                case "names":
                    return {"values": self._named(request["names"])}
                case what:
                    return self._answer(what, request)
        except BaseException as error:  # the program's; even SystemExit ends no more than the call
            return describe_exception(error)

    def _load(self) -> dict[str, Any]:
        sys.modules[NAME] = self._module  # dataclasses and the like look for it there
        exec(compile(self._code, f"{NAME}.py", "exec", dont_inherit=True), vars(self._module))
        return {}

    def _named(self, names: list[str]) -> dict[str, Json]:
        own = vars(self._module)
        return {name: encode(own[name], self._refer) for name in names if name in own}

    def _answer(self, what: str, request: dict[str, Any]) -> dict[str, Any]:
        target = self._exported[request["of"]]
        args = [decode(one, self._resolve, MAX_SENT_DEPTH) for one in request["args"]]
        kwargs = {name: decode(one, self._resolve, MAX_SENT_DEPTH) for name, one in request["kwargs"].items()}
        value = _ASKED[what](target, *args, **kwargs)
        reply = {"value": encode(value, self._refer)}
        if what == "call" and (changed := self._changed(args, request["args"])):
            reply["changed"] = changed
        return reply

    def _changed(self, args: list[Any], sent: list[Json]) -> list[tuple[int, Json]]:
        """Arguments that the program changed in place."""
        found: list[tuple[int, Json]] = []
        for place, argument in enumerate(args):
            if isinstance(argument, list | dict | set | bytearray | deque):
                now = encode(argument, self._refer)
                if now != sent[place]:
                    found.append((place, now))
        return found

    def _refer(self, value: object) -> Json:
        if isinstance(value, _Callback):
            return {"yours": value.number}
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._exported)
            self._exported.append(value)
        return {"theirs": number}

    def _resolve(self, whose: str, number: int) -> object:
        return self._exported[number] if whose == "yours" else _Callback(number, self._call_back)

    def _call_back(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reply = self._peer.ask(
            {
                "of": number,
                "args": [encode(one, self._refer) for one in args],
                "kwargs": {name: encode(one, self._refer) for name, one in kwargs.items()},
            }
        )
        if "raised" in reply:
            raise carried_exception(reply)
        return decode(reply["value"], self._resolve, MAX_SENT_DEPTH)


class _Callback:
    """A function that a test gave as an argument."""

    def __init__(self, number: int, call: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self.number, self._call = number, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.number, args, kwargs)
