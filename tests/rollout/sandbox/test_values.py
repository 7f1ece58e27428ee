"""What travels comes out as it went in, of exact types; and whatever a program sends instead is refused, not obeyed."""

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import Any

import pytest

from towline.rollout.sandbox.values import MAX_DEPTH, MAX_SENT_DEPTH, NotPlain, decode, encode, pack, unpack

PLAIN = [
    *(None, True, False, 0, -1, 2**63 - 1, 2**63, -(2**63), 10**5000, -(10**5000), 0.1, -0.0, 5e-324, 1e308),
    *("", "é\u4e2d\U0001f600", "\udcff", "\0\n", "x" * 100_000, b"", bytes(range(256)), bytearray(b"ab")),
    *(1 + 2j, complex(math.inf, -0.0), range(3), range(-5, 10**30, 7), [], [[], [[]]], (), (1,), ((), [()])),
    *(set(), {1, "a", (2, 3)}, frozenset({1.5}), {}, {1: "a", "1": "b", (1, 2): [3], None: {}}),
    *(Counter("banana"), OrderedDict([("b", 1), ("a", 2)]), deque([1, [2]])),
    *(Decimal("1.10"), Decimal("-Infinity"), Decimal("1E+999999"), Fraction(-1, 3), Fraction(10**40, 7)),
    *(date(2024, 2, 29), time(1, 2, 3, 4), datetime(2024, 2, 29, 1, 2, 3), datetime(2024, 1, 1, tzinfo=UTC)),
    *(datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-3))), timedelta(days=-1, seconds=5, microseconds=7)),
    *(int, str, list, dict, bool, object, {"tuple": [1]}, {"theirs": 0}, {"a": 1, "b": 2}, {"int": "0x1"}),
]  # fmt: skip


def no_reference(*_: object) -> Any:
    raise NotPlain("a reference")


def round_trip(value: object) -> Any:
    return decode(unpack(pack({"value": encode(value, no_reference)}))["value"], no_reference)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return one == other


@pytest.mark.parametrize("value", PLAIN, ids=range(len(PLAIN)))
def test_plain_values_come_out_as_they_went_in(value: object) -> None:
    assert same(round_trip(value), value)


def test_numbers_that_are_none_and_signs_of_zero() -> None:
    nan, inf, negative, zero = round_trip([math.nan, math.inf, -math.inf, -0.0])
    assert math.isnan(nan)
    assert (inf, negative, math.copysign(1, zero)) == (math.inf, -math.inf, -1)
    assert round_trip(Decimal("sNaN")).is_snan()


def test_a_default_dict_comes_without_its_factory() -> None:
    value = round_trip(defaultdict(list, {"a": [1]}))
    assert type(value) is defaultdict
    assert value == {"a": [1]}
    assert value.default_factory is None


def test_subclasses_come_as_what_they_hold() -> None:
    class Colour(IntEnum):
        RED = 3

    pair = namedtuple("pair", "a b")
    assert same(round_trip([Colour.RED, pair(1, 2)]), [3, (1, 2)])


def test_subclasses_that_lie_come_as_their_content() -> None:
    def lie(*_: object) -> Any:
        return True

    operators = {name: lie for name in ("__eq__", "__lt__", "__iter__", "__len__", "__str__", "__int__", "__float__")}
    operators |= {"__hash__": lambda self: 1, "items": lie, "__index__": lambda self: 7, "__repr__": lambda self: "7"}
    values = [5, 10**30, 2.5, "text", [1, 2], (3, 4), {"a": 1}]
    lying = [type("Lying", (type(value),), dict(operators))(value) for value in values]
    assert same(round_trip(lying), values)


def test_what_has_no_form_is_referred_to() -> None:
    class Thing:
        pass

    thing, found = Thing(), []

    def refer(value: object) -> dict[str, int]:
        found.append(value)
        return {"theirs": len(found)}

    sent = encode([thing, len, Thing, memoryview(b""), {1: thing}], refer)
    assert sent == [{"theirs": 1}, {"theirs": 2}, {"theirs": 3}, {"theirs": 4}, {"dict": [[1, {"theirs": 5}]]}]
    assert decode(sent, lambda whose, number: (whose, number))[4] == {1: ("theirs", 5)}


def test_a_class_that_calls_itself_int_is_not_int() -> None:
    impostor = type("int", (), {})
    assert encode(impostor, lambda value: {"theirs": 7}) == {"theirs": 7}


def nested(kind: str, depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"list": [value], "tuple": (value,), "dict": {"a": value}, "deque": deque([value])}[kind]
    return value


@pytest.mark.parametrize("kind", ["list", "tuple", "dict", "deque"])
def test_depth_is_counted_in_values_and_bounded(kind: str) -> None:
    def depth_of(value: Any) -> int:
        depth = 0
        while value != 1:
            value, depth = next(iter(value.values() if isinstance(value, dict) else value)), depth + 1
        return depth

    assert depth_of(round_trip(nested(kind, MAX_DEPTH))) == MAX_DEPTH
    with pytest.raises(NotPlain):
        round_trip(nested(kind, MAX_DEPTH + 1))
    sent = encode(nested(kind, MAX_SENT_DEPTH), no_reference)
    assert depth_of(decode(unpack(pack({"value": sent}))["value"], no_reference, MAX_SENT_DEPTH)) == MAX_SENT_DEPTH
    with pytest.raises(NotPlain):
        encode(nested(kind, MAX_SENT_DEPTH + 1), no_reference)


def test_a_value_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotPlain):
        encode(endless, no_reference)


MALICIOUS: list[Any] = [
    *({}, {"a": 1, "b": 2}, {"no tag": 1}, {"": []}, {"int": 5}, {"int": None}, {"int": "zz"}, {"int": []}),
    *({"float": "1"}, {"float": []}, {"float": {}}, {"type": "eval"}, {"type": []}, {"type": {}}, {"type": "type"}),
    *({"theirs": "0"}, {"theirs": True}, {"theirs": 0.5}, {"yours": None}, {"yours": [0]}, {"yours": -1}, {"yours": 9}),
    *({"tuple": 5}, {"tuple": "abc"}, {"tuple": {"theirs": 0}}, {"set": {"theirs": 0}}, {"set": [[1]]}),
    *({"dict": 5}, {"dict": ["ab", 3]}, {"dict": [[1]]}, {"dict": [[1, 2, 3]]}, {"dict": [[[1], 2]]}, {"dict": {}}),
    *({"dict": None}, {"Counter": [[[], 1]]}, {"OrderedDict": "ab"}, {"defaultdict": [1]}, {"deque": None}),
    *({"frozenset": [{"set": []}]}, {"set": [{"Counter": []}]}, {"bytes": 5}, {"bytes": "a"}, {"bytes": ["YQ=="]}),
    *({"bytes": "\udcff"}, {"bytearray": None}, {"complex": []}, {"complex": ["1"]}, {"complex": ["x", "y"]}),
    *({"complex": {}}, {"complex": 1}, {"range": []}, {"range": ["0x0", "0x1", "0x0"]}, {"range": 5}, {"range": {}}),
    *({"Decimal": "x"}, {"Decimal": [1]}, {"Decimal": {}}, {"Decimal": None}, {"Fraction": ["0x1", "0x0"]}),
    *({"Fraction": []}, {"Fraction": ["0x1"]}, {"Fraction": None}, {"Fraction": [1, 2]}, {"date": "2024-02-30"}),
    *({"date": 5}, {"datetime": "now"}, {"datetime": []}, {"time": "25:00"}, {"time": None}, {"timedelta": ["a"]}),
    *({"timedelta": [10**12]}, {"timedelta": 5}, {"timedelta": [1] * 9}, {"timedelta": {"a": 1}}, {"builtins": []}),
    *({"__class__": []}, {"list": [1]}, {"object": []}, {"str": "a"}, {"memoryview": []}, {"NoneType": []}),
]  # fmt: skip


@pytest.mark.parametrize("place", range(len(MALICIOUS)))
def test_what_encode_does_not_make_is_refused(place: int) -> None:
    with pytest.raises(NotPlain):
        decode(MALICIOUS[place], no_reference)
    with pytest.raises(NotPlain):
        decode([{"tuple": [MALICIOUS[place]]}], no_reference)


@pytest.mark.parametrize(
    "content",
    [
        *(
            b"",
            b"\xff\xfe",
            b"[]",
            b"1",
            b"null",
            b'"a"',
            b"{",
            b'{"a": NaN}',
            b'{"a": Infinity}',
            b"{}{}",
            b"{'a': 1}",
        ),
        *(
            b'{"a": ' + b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"a": ' + b"9" * 5000 + b"}",
            b"\0" * 10,
            "{}".encode("utf-7") + b"x",
        ),
    ],
    ids=range(16),
)
def test_what_is_no_message_is_refused(content: bytes) -> None:
    with pytest.raises(NotPlain):
        unpack(content)


def test_random_messages_are_decoded_to_plain_values_or_refused() -> None:
    random_ = random.Random(7)
    tags = ["int", "float", "type", "tuple", "set", "dict", "Counter", "OrderedDict", "defaultdict", "deque", "bytes"]
    tags += [
        "frozenset",
        "bytearray",
        "complex",
        "range",
        "Decimal",
        "Fraction",
        "datetime",
        "date",
        "time",
        "timedelta",
    ]
    tags += ["theirs", "yours", "other", ""]
    atoms = [None, True, 0, -1, 10**20, 0.5, 1e400, "", "a", "0x1f", "-0x2", "nan", "inf", "int", "YQ==", "2024-01-01"]
    atoms += ["1", "12:00", "2024-01-01T00:00:00", "\ud800"]

    def make(depth: int) -> Any:
        choice = random_.random()
        if depth == 0 or choice < 0.3:
            return random_.choice(atoms)
        if choice < 0.6:
            return [make(depth - 1) for _ in range(random_.randrange(4))]
        return {random_.choice(tags): make(depth - 1) for _ in range(1 if choice < 0.97 else 2)}

    num_decoded = num_refused = 0
    for _ in range(8_000):
        try:
            value = decode(unpack(pack_anything({"value": make(4)}))["value"], no_reference)
        except NotPlain:
            num_refused += 1
        else:
            num_decoded += 1
            round_trip(value)  # what was taken can be sent on
    assert num_decoded > 2_000
    assert num_refused > 2_000


def pack_anything(message: Any) -> bytes:
    return json.dumps(message).replace("Infinity", "1e400").encode()


def test_random_bytes_are_refused_or_decoded() -> None:
    random_ = random.Random(8)
    proper = pack({"value": encode([1, (2.5, "x"), {3: {4}}], no_reference)})
    for _ in range(5_000):
        broken = bytearray(proper)
        for _ in range(random_.randrange(1, 4)):
            broken[random_.randrange(len(broken))] = random_.randrange(256)
        try:
            decode(unpack(bytes(broken)).get("value"), no_reference)
        except NotPlain:
            continue
