"""How values travel between tests and a program: JSON, with tags for what JSON has not. Nothing is unpickled.

What is decoded is made of exact built-in types and a few of the standard library, whatever the sender says: an object
with an `__eq__` of its own does not come through. What has no form here is referred to by a number.
"""

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

MAX_DEPTH = 100
"""Of what tests take from a program."""
MAX_SENT_DEPTH = 200
"""So that tests can wrap what they got and hand it back."""
MAX_MESSAGE_BYTES = 8 * 2**20
"""Of what tests take from a program, or twice what they sent if that is more."""
_MAX_JSON_INT = 2**63
"""Longer numbers travel in base 16, which takes linear time to read."""
NAMED_TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range, object)
}

Json = Any
Refer = Callable[[object], Json]
Resolve = Callable[[str, int], object]


class NotPlain(ValueError):
    """A value has no form here, or a message is none."""


def encode(value: object, refer: Refer, depth: int = 0) -> Json:
    """
    Args:
        refer: called with what has no form here; returns `{"theirs": number}`, `{"yours": number}` or raises.
    """
    if depth > MAX_SENT_DEPTH:
        raise NotPlain(f"nested more than {MAX_SENT_DEPTH} deep")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_MAX_JSON_INT < number < _MAX_JSON_INT else {"int": hex(number)}
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else {"float": repr(number)}
    if isinstance(value, str):
        return str.__str__(value)

    def items(found: Any) -> list[Json]:
        return [encode(item, refer, depth + 1) for item in found]

    if isinstance(value, list):
        return items(list.__iter__(value))
    if isinstance(value, tuple):  # named tuples too
        return {"tuple": items(tuple.__iter__(value))}
    if isinstance(value, dict):
        name = next((kind.__name__ for kind in _DICT_TYPES if isinstance(value, kind)), "dict")
        # Only its own class knows the order of an OrderedDict.
        pairs = OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value)
        return {name: [items(pair) for pair in pairs]}
    if kind in _ITERABLES:
        return {kind.__name__: items(value)}
    if kind in _WRITTEN:
        return {kind.__name__: _WRITTEN[kind][0](value)}
    if isinstance(value, type) and NAMED_TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    return refer(value)


def decode(value: Json, resolve: Resolve, max_depth: int = MAX_DEPTH) -> Any:
    """
    Args:
        resolve: called with ("theirs" or "yours", number); raises NotPlain if there is none of that number.

    Raises:
        NotPlain: it is not what `encode` makes.
    """
    if max_depth < 0:
        raise NotPlain("nested too deep")
    if isinstance(value, list):
        return [decode(item, resolve, max_depth - 1) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise NotPlain("a value with more than one tag")
    ((tag, content),) = value.items()
    try:
        return _decode_tagged(tag, content, resolve, max_depth)
    except NotPlain:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise NotPlain(f"no proper {str(tag)[:20]}: {type(error).__name__}") from None


def _decode_tagged(tag: str, content: Json, resolve: Resolve, max_depth: int) -> Any:
    if tag in ("theirs", "yours"):
        if type(content) is not int:
            raise NotPlain("a reference is a number")
        return resolve(tag, content)
    if tag == "int":
        return int(content, 16)
    if tag == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[content]
    if tag == "type":
        return NAMED_TYPES[content]
    if tag in _READERS:
        return _READERS[tag](content)
    if not isinstance(content, list):
        raise NotPlain(f"a {tag[:20]} is a list of its items")
    if tag == "dict" or tag in _DICTS:
        whole = {}
        for key, item in content:
            whole[decode(key, resolve, max_depth - 1)] = decode(item, resolve, max_depth - 1)
        return whole if tag == "dict" else _DICTS[tag](whole)
    return _BY_NAME[tag]([decode(item, resolve, max_depth - 1) for item in content])


def pack(message: Json) -> bytes:
    """ASCII, so that half a surrogate pair travels as well."""
    return json.dumps(message, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode()


def unpack(content: bytes) -> dict[str, Any]:
    """
    Raises:
        NotPlain: it is no message.
    """
    try:
        message = json.loads(content, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise NotPlain(f"no message: {type(error).__name__}") from None
    if not isinstance(message, dict):
        raise NotPlain("no message: not an object")
    return message


def _refuse(constant: str) -> None:
    raise NotPlain(f"no JSON: {constant}")


_DICTS: dict[str, Any] = {
    "Counter": Counter,
    "OrderedDict": OrderedDict,
    "defaultdict": lambda whole: defaultdict(None, whole),
}
_DICT_TYPES = (Counter, OrderedDict, defaultdict)
_ITERABLES = (set, frozenset, deque)
_BY_NAME: dict[str, Any] = {kind.__name__: kind for kind in (tuple, *_ITERABLES)}
_WRITTEN: dict[type, tuple[Callable[[Any], Json], Callable[[Json], Any]]] = {
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    bytearray: (lambda value: base64.b64encode(value).decode(), lambda text: bytearray(base64.b64decode(text))),
    complex: (
        lambda value: [repr(value.real), repr(value.imag)],
        lambda parts: complex(float(parts[0]), float(parts[1])),
    ),
    range: (lambda value: [hex(end) for end in (value.start, value.stop, value.step)],
            lambda ends: range(*(int(end, 16) for end in ends))),
    Decimal: (str, Decimal),
    Fraction: (lambda value: [hex(value.numerator), hex(value.denominator)],
               lambda parts: Fraction(int(parts[0], 16), int(parts[1], 16))),
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    timedelta: (lambda value: [value.days, value.seconds, value.microseconds], lambda parts: timedelta(*parts)),
}  # fmt: skip
"""Exact type → how it is written and read."""
_READERS = {kind.__name__: read for kind, (_, read) in _WRITTEN.items()}
