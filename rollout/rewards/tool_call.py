"""Does a completion call the right tools with the right arguments?

The form is that of Hermes and Qwen: `<tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>`, any
number of times, with any text around. Nothing is called; calls are compared as JSON.
"""

import json
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation
from typing import Any, cast

from towline.rollout.rewards.boxed import after_thinking
from towline.rollout.rewards.verdict import Verdict
from towline.storage.errors import DataError

OPEN, CLOSE = "<tool_call>", "</tool_call>"
Call = dict[str, Any]


class _Malformed(Exception):
    """Never leaves this file: no call, and why."""


def grade(completion: str, gold: str) -> Verdict:
    """1.0 if what follows the thinking makes exactly the gold calls, else 0.0.

    Calls of one completion are made side by side: their order does not matter, their number does. Arguments are equal
    as JSON values: the order of keys does not matter, that of lists does; 1 and 1.0 are one number; 1, "1" and true are
    three values. A call that is not closed, is no JSON, or repeats a key makes the whole completion wrong.

    Args:
        gold: JSON: one call, or a list of calls; an empty list: no tool may be called.

    Raises:
        DataError: gold is neither.
    """
    expected = _gold_calls(gold)
    answer = after_thinking(completion)
    if answer is None:
        return Verdict(value=0.0, detail="the thinking is not closed")
    try:
        found = list(_calls(answer))
    except _Malformed as reason:
        return Verdict(value=0.0, detail=str(reason))
    if len(found) != len(expected):
        return Verdict(value=0.0, detail=f"{len(found)} calls, expected {len(expected)}")
    for call in found:
        place = next((place for place, one in enumerate(expected) if _is_same(call, one)), None)
        if place is None:
            return Verdict(value=0.0, detail=f"the call of {call['name'][:50]} is not expected, or not so")
        del expected[place]
    return Verdict(value=1.0)


def _calls(answer: str) -> Iterator[Call]:
    before, *pieces = answer.split(OPEN)
    if CLOSE in before:
        raise _Malformed(f"a {CLOSE} without its {OPEN}")
    for piece in pieces:
        body, close, after = piece.partition(CLOSE)
        if not close:
            raise _Malformed("a call is not closed")
        if CLOSE in after:
            raise _Malformed(f"a {CLOSE} without its {OPEN}")
        yield _call(_value(body))


def _value(text: str) -> Any:
    """JSON as RFC 8259 has it, numbers exact; a repeated key means something else to every reader, so it is refused."""
    try:
        return json.loads(
            text, parse_int=Decimal, parse_float=Decimal, parse_constant=_refuse, object_pairs_hook=_object
        )
    except json.JSONDecodeError as error:
        raise _Malformed(f"no JSON: {error.msg} at {error.pos}") from None
    except RecursionError:
        raise _Malformed("no usable JSON: nested without end") from None
    except InvalidOperation:
        raise _Malformed("no usable JSON: a number beyond every size") from None


def _refuse(constant: str) -> None:
    raise _Malformed(f"no JSON: {constant}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Malformed("a key comes twice")
    return found


def _call(value: Any) -> Call:
    if not isinstance(value, dict):
        raise _Malformed('no call: expected {"name": ..., "arguments": {...}}')
    call = cast(Call, value)
    if call.keys() != {"name", "arguments"}:
        raise _Malformed(f"a call has the keys {', '.join(call)[:100]}; expected name, arguments")
    if not isinstance(call["name"], str) or not isinstance(call["arguments"], dict):
        raise _Malformed("a call's name is a string, its arguments are an object")
    return call


def _is_same(one: Any, other: Any) -> bool:
    """No deeper than the shallower of the two."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        mine, theirs = cast(Call, one), cast(Call, other)
        return mine.keys() == theirs.keys() and all(_is_same(mine[key], theirs[key]) for key in mine)
    if isinstance(one, list):
        left, right = cast(list[Any], one), cast(list[Any], other)
        return len(left) == len(right) and all(map(_is_same, left, right))
    return one == other


def _gold_calls(gold: str) -> list[Call]:
    try:
        value = _value(gold)
        return [_call(one) for one in (cast(list[Any], value) if isinstance(value, list) else [value])]
    except _Malformed as reason:
        raise DataError(f"the gold answer is not a tool call or a list of them ({reason}): {gold[:200]!r}") from None
