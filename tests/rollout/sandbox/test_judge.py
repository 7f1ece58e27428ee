"""Tests run apart from the program: what they see of it, and what it cannot make of them."""

import json
import os
import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import pytest

from towline.rollout.rewards.code_tests import run_tests
from towline.rollout.rewards.verdict import Verdict
from towline.rollout.sandbox.judge import Judge, TestFault, read_suite
from towline.rollout.sandbox.limits import Limits
from towline.storage.records import ScoreStatus

LIMITS = Limits(seconds=10)
DOUBLE = "def f(x):\n    return 2 * x"


def verdict(code: str, *tests: str, **options: Any) -> Verdict:
    return run_tests(code, tests, options.pop("limits", LIMITS), **options)


def passes(code: str, *tests: str, **options: Any) -> bool:
    found = verdict(code, *tests, **options)
    assert found.status == ScoreStatus.OK, found.detail
    assert bool(found.detail) == (found.value != 1)
    return found.value == 1


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (DOUBLE, "assert f(2) == 4 and f('ab') == 'abab' and f([1]) == [1, 1]"),
        (
            "def f(x): return x",
            "for x in (None, 1.5, {1, 2}, {'a': (1, [2])}, b'x', range(3), 10**5000):\n    assert f(x) == x",
        ),
        ("def f(n): return 3 ** n", "assert f(10_000) == 3 ** 10_000"),
        ("def f(g, *a, **k): return g(*a, **k) + 1", "assert f(lambda x, y: x * y, 3, y=4) == 13"),
        (
            "def f(g): return [g(i) for i in range(3)]",
            "seen = []\nassert f(seen.append) == [None] * 3\nassert seen == [0, 1, 2]",
        ),
        ("def f(n): return lambda x: x + n", "add = f(3)\nassert add(4) == 7 and f(1)(1) == 2"),
        ("def f(g): return lambda x: g(g(x))", "assert f(f(lambda x: x + 1))(0) == 4"),
        ("def f(g): return g", "def own(): pass\nassert f(own) is own"),
        (
            "def f(g):\n try: return g()\n except KeyError as e: return str(e)",
            "def own(): raise KeyError('k')\nassert f(own) == \"'k'\"",
        ),
        (
            "def f(n):\n for i in range(n): yield i * i",
            "assert list(f(4)) == [0, 1, 4, 9]\nassert sum(f(3)) == 5\nassert 9 in f(4)",
        ),
        ("def f(n):\n while True: n += 1; yield n", "g = f(0)\nassert [next(g) for _ in range(3)] == [1, 2, 3]"),
        ("def f(x): return map(str, x)", "assert ''.join(f([1, 2])) == '12'"),
        ("def f(d): return d.keys()", "assert sorted(f({'b': 1, 'a': 2})) == ['a', 'b']"),
        (
            "def f(k): return sorted(k)",
            "assert f({'b': 1, 'a': 2}.keys()) == ['a', 'b'] and f({1: 2}.items()) == [(1, 2)]",
        ),
        (
            "def f(x): raise ValueError('odd')",
            "try:\n    f(1)\n    assert False\nexcept ValueError as e:\n    assert str(e) == 'odd'",
        ),
        (
            "class E(KeyError): pass\ndef f(x): raise E('k')",
            "try:\n    f(1)\n    assert False\nexcept LookupError:\n    pass",
        ),
        (
            "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
            "assert f() == (1, 2)",
        ),
        (
            "def f(x): return x",
            "from collections import *\nassert f(Counter('aab')) == Counter('aab') and f(deque([1])) == deque([1])",
        ),
        ("import math\nLIMIT = 7\ndef f(x): return min(x, LIMIT)", "assert f(9) == LIMIT == 7"),
        ("def f(x): return {'a': [lambda: x]}", "assert f(3)['a'][0]() == 3"),
        ("def f(x): return x", "x = {}\nfor _ in range(90):\n    x = {'a': x}\nassert f(x) == x and f([f(x)]) == [x]"),
        ("def f(x): return len(x)", "assert f('x' * 10_000_000) == 10_000_000"),
    ],
    ids=range(22),
)
def test_right_programs_pass(code: str, test: str) -> None:
    assert passes(code, test)


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ("x.sort()", "[3, 1, 2]", "[1, 2, 3]"),
        ("x.clear()", "[3, 1, 2]", "[]"),
        ("x[0].append(5)", "[[1], 2]", "[[1, 5], 2]"),
        ("x['b'] = x.pop('a')", "{'a': 1}", "{'b': 1}"),
        ("x |= {9}", "{1}", "{1, 9}"),
        ("x.append(4)", "deque([1])", "deque([1, 4])"),
        ("x.rotate(1)", "deque([1, 2, 3])", "deque([3, 1, 2])"),
        ("x.extend(b'c')", "bytearray(b'ab')", "bytearray(b'abc')"),
        ("x['k'] += 1", "Counter(k=1)", "Counter(k=2)"),
        ("x.move_to_end('a')", "OrderedDict(a=1, b=2)", "OrderedDict(b=2, a=1)"),
        ("x = [9]", "[1]", "[1]"),
    ],
)
def test_changes_of_arguments_in_place_are_seen(change: str, before: str, after: str) -> None:
    test = f"x = y = {before}\nf(x)\nassert x == {after}, x\nassert y is x"
    assert passes(f"def f(x):\n    {change}", test, setup="from collections import *")


STACK = """
class Stack:
    count = 0
    def __init__(self, *items): self.items = list(items); Stack.count += 1
    def push(self, item): self.items.append(item); return self
    def pop(self): return self.items.pop()
    def peek(self): return self.items[-1]
    @property
    def size(self): return len(self.items)
    @classmethod
    def of(cls, items): return cls(*items)
    def __len__(self): return len(self.items)
    def __bool__(self): return bool(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, place): return self.items[place]
    def __str__(self): return f"Stack{self.items}"
    def __eq__(self, other): return True
"""


def test_objects_with_methods_are_used_from_outside() -> None:
    assert passes(
        STACK,
        "s = Stack(1)\nassert s.push(2).push(3).pop() == 3\nassert s.size == len(s) == 2 and s.peek() == 2",
        "s = Stack.of([1, 2])\nassert list(s) == [1, 2] and s[0] == 1 and str(s) == 'Stack[1, 2]' and 2 in s\nassert s",
        "s = Stack()\nassert not s\ns.colour = 'red'\nassert s.colour == 'red' and not hasattr(s, 'weight')",
        "try:\n    Stack().pop()\n    assert False\nexcept IndexError:\n    pass",
        "s = Stack()\nassert s.push(1) is s.push(2)",
        "assert Stack.count == 5",
    )


@pytest.mark.parametrize(
    "test",
    [
        *("assert s == Stack()", "assert s == 4", "assert 4 == s", "assert s in [4]", "assert [s] == [4]"),
        "assert s != 4",
        *("assert abs(s - 4) < 1e-6", "assert s < 5", "assert s >= 4", "assert 4 - s == 0", "assert round(s) == 4"),
        *("assert int(s) == 4", "assert float(s) == 4", "assert math.isclose(s, 4)", "assert {s: 1} == {4: 1}"),
        *("assert isinstance(s, int)", "assert {s} == {4}", "assert s + 1 == 5", "assert -s == -4"),
        "assert s.__eq__(4)",
        *("assert s is None", "assert (s,) < (5,)", "assert sorted([s, 4]) == [4, s]", "assert max(s, 3) == 4"),
    ],
)  # fmt: skip
def test_objects_take_no_part_in_comparisons_and_arithmetic(test: str) -> None:
    numbers = {"round", "int", "float", "index", "hash", "sub", "rsub", "add", "radd", "abs", "neg"}
    names = sorted(numbers | {"eq", "ne", "lt", "le", "gt", "ge", "bool", "contains"})
    lies = "\n".join(f"    def __{name}__(self, *_): return {4 if name in numbers else True}" for name in names)
    assert not passes(f"class Stack:\n{lies}\ns = Stack()", test)


def test_names_are_the_programs_only_where_nobody_else_has_them() -> None:
    for test in ("abs(f(0))", "len(f(''))", "isinstance(f(1), str)", "all([f(0)])", "round(f(0))", "sorted(f(''))"):
        lie = f"def {test.partition('(')[0]}(*a): return True"
        assert not passes(f"{DOUBLE}\n{lie}", f"assert {test}")
    assert passes("def abs(x): return 5\ndef f(): return -3", "assert abs(f()) == 3")
    assert passes("def sum(x): return 5", "assert sum([1]) == 5", entry_points=["sum"])
    assert passes("def helper(x): return 5", "assert helper(1) == 1", setup="def helper(x): return x")
    assert passes(
        "def helper(x): return 5", "assert helper(1) == 5", setup="def helper(x): return x", entry_points=["helper"]
    )
    assert not passes("def g(x): return x", "assert f(1) == 1")


def test_modules_of_the_standard_library_are_the_tests_own() -> None:
    lying = "class math:\n    isclose = staticmethod(lambda *a, **k: True)\n    pi = 4\ndef f(x): return 0"
    assert not passes(lying, "assert math.isclose(f(2), 4)")
    assert not passes(lying, "import math\nassert math.isclose(f(2), 4)")
    assert passes(lying, "assert math.floor(math.pi) == 3 and f(1) == 0")
    assert passes("def random(x): return x + 1", "assert random(1) == 2")
    patched = "import math, json\nmath.isclose = lambda *a, **k: True\njson.dumps = lambda x: '4'\ndef f(x): return 0"
    assert not passes(patched, "import math\nassert math.isclose(f(2), 4)")
    assert not passes(patched, "assert json.dumps(f(2)) == '4'")


@pytest.mark.parametrize(
    "code",
    [
        *("import os\ndef f(x): os._exit(0)", "import sys\ndef f(x): sys.exit(0)", "def f(x): raise SystemExit"),
        *("def f(x): raise AssertionError", "def f(x): raise KeyboardInterrupt", "def f(x): return NotImplemented"),
        *("def f(x): return 5", "f = 4", "f = None", "", "f = int", "class f: pass", "def f(x): yield 4"),
        "async def f(x): return 4",
        *("def f(x)", "import nothing_like_it\ndef f(x): return 4", "x = input()\ndef f(x): return 4"),
        *("def f(x): return f(x)", "import os\nos.kill(os.getpid(), 9)", "exit()"),
    ],
)  # fmt: skip
def test_wrong_programs_fail(code: str) -> None:
    assert not passes(code, "assert f(2) == 4")


def test_a_bare_except_does_not_hide_a_dead_program() -> None:
    code = "import os\ndef f(x): os._exit(0)"
    assert not passes(code, "try:\n    f(1)\nexcept:\n    pass")
    assert not passes(code, "try:\n    f(1)\nexcept BaseException:\n    pass")
    found = verdict(code, "try:\n    f(1)\nexcept:\n    pass", "assert True", partial_credit=True)
    assert found.value == 0.0
    assert found.detail.replace(" (exit code 0)", "") == "test 1 of 2: the program ended; 0 of 2 passed"


def test_what_a_program_raises_is_told() -> None:
    found = verdict("def f(x): raise ValueError('too\\ud800 odd')", "assert f(2) == 4", "assert f(3) == 6")
    assert found.detail == "test 1 of 2: the program raised ValueError: too\\ud800 odd; 0 of 2 passed"
    found = verdict("class Own(ValueError): pass\ndef f(x): raise Own('why')", "assert f(2) == 4")
    assert found.detail == "test 1 of 1: the program raised ValueError: Own: why; 0 of 1 passed"
    assert "does not load: SyntaxError" in verdict("def f(", "assert f(2) == 4").detail
    assert "does not load: EOFError" in verdict("input()", "assert True").detail
    found = verdict(DOUBLE, "assert f(2) == 5, f'got {f(2)}'")
    assert found.detail == "test 1 of 1: AssertionError: got 4; 0 of 1 passed"


def test_details_are_short_and_can_be_written() -> None:
    found = verdict("def f(x): raise ValueError('\\U0001f600\\ud800' * 10_000)", "assert f(2) == 4")
    assert len(found.detail) <= 300
    assert json.loads(json.dumps(found.detail).encode()) == found.detail


@pytest.mark.parametrize(
    ("tests", "setup", "why"),
    [
        ([], "", "there are no tests"),
        (["assert f(2) =="], "", "test 1 is no Python: SyntaxError"),
        (["assert f(2) == 4", "a\0b"], "", "test 2 is no Python: "),
        (["assert f(2) == 4", "(" * 500 + ")" * 500], "", "test 2 is no Python: "),
        (["assert f(2) == 4"], "def g(", "the setup is no Python: SyntaxError"),
        (["assert f(2) == 4"], "1 / 0", "the setup cannot be run: ZeroDivisionError"),
        (["assert f(2) == 4"], "raise SystemExit", "the setup cannot be run: SystemExit"),
        (["assert f(2) == 4"], "import nothing_like_it", "the setup cannot be run: ModuleNotFoundError"),
        (["import nothing_like_it\nassert f(2) == 4"], "", "test 1 cannot be run: No module named 'nothing_like_it'"),
        (["assert f(object()) == 4"], "", "an argument cannot be given to the program: it has an object"),
        (
            ["x = []\nx.append(x)\nassert f(x)"],
            "",
            "an argument cannot be given to the program: nested more than 200 deep",
        ),
    ],
    ids=range(11),
)
@pytest.mark.parametrize("code", [DOUBLE, "import os\nos._exit(0)", "raise ImportError", "def f(x): raise ImportError"])
def test_tests_at_fault_give_no_verdict(code: str, tests: list[str], setup: str, why: str) -> None:
    found = run_tests(code, tests, LIMITS, setup=setup)
    loads = code in (DOUBLE, "def f(x): raise ImportError")
    if loads or "no Python" in why or not tests:
        assert (found.value, found.status) == (None, ScoreStatus.FAILED)
        assert found.detail.startswith(f"gold_unusable: {why}")
    else:  # the program is wrong whatever the tests are
        assert found.value == 0.0


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def T(): return {}\ndef g(x): return 1", "assert g(iter(T().items())) == 1"),
        ("def T(): return memoryview(b'')\ndef g(x): return 1", "assert g([T(), open]) == 2"),
        ("def f(x): raise ImportError('numpy')", "assert f(1) == 1"),
        ("def f(x): raise ModuleNotFoundError(name='numpy')", "import math\nassert f(1) == math.pi"),
        ("def f(x): return 'nothing_like_it'", "assert __import__(f(1)).x"),
        (
            "def f(x):\n for _ in range(99): x = [x]\n return x",
            "x = f(1)\nfor _ in range(3):\n    x = f([x])\nassert x == 1",
        ),
        ("def f(g): return g()", "def own():\n    import nothing_like_it\nassert f(own) == 1"),
        ("def f(g): return g()", "assert f(object) == 1"),
    ],
    ids=range(8),
)
def test_no_program_can_have_its_tests_blamed(code: str, test: str) -> None:
    assert verdict(code, test).value == 0.0


@pytest.mark.parametrize("given", ["type", "lambda name, bases, space: type(name, bases, space)", "partial(type, 'X')"])
def test_objects_that_a_test_makes_for_a_program_do_not_come_back(given: str) -> None:
    """With operators that the program answers, they would be equal to everything."""
    code = """
def f(make):
    space = {"__call__": lambda *a: 1, "__eq__": lambda *a: True}
    try:
        kind = make("X", (object,), space)
    except TypeError:
        kind = make((object,), space)
    return kind()
"""
    assert verdict(code, f"assert f({given}) == 4", setup="from functools import partial").value == 0.0


def test_a_program_sees_nothing_of_the_tests() -> None:
    spy = """
import gc, sys
def f(x):
    text = repr(sys.argv) + repr([vars(module) for module in list(sys.modules.values())]) + repr(gc.get_objects())
    frame = sys._getframe()
    while frame:
        text += repr(frame.f_locals) + repr(frame.f_globals)
        frame = frame.f_back
    return "secret of " + str(x) in text
"""
    found = verdict(spy, "assert f('the tests') is False, 'secret of the tests'", setup="other = 'secret of the tests'")
    assert found.value == 1, found.detail


class Forger:
    """The program's end of a talk in which it says what it likes."""

    def __init__(self, *replies: Any) -> None:
        self._replies = list(replies)

    def judge(self, *tests: str, setup: str = "") -> list[dict[str, Any]]:
        ours, theirs = socket.socketpair()
        reports: list[dict[str, Any]] = []
        thread = threading.Thread(target=self._answer, args=[theirs])
        thread.start()
        with ours:
            Judge(ours.fileno(), reports.append).run(setup, list(tests), [], stop_at_first=False)
        thread.join()
        return reports

    def _answer(self, end: socket.socket) -> None:
        with end:
            for reply in self._replies:
                if not _question(end):
                    return
                content = reply if isinstance(reply, bytes) else json.dumps({"reply": reply}).encode()
                try:
                    end.sendall(content if isinstance(reply, bytes) else struct.pack("!I", len(content)) + content)
                except OSError:
                    return
            with suppress(OSError):
                end.shutdown(socket.SHUT_WR)
                while end.recv(2**16):
                    pass


def _question(end: socket.socket) -> bytes:
    head = end.recv(4, socket.MSG_WAITALL)
    return end.recv(struct.unpack("!I", head)[0], socket.MSG_WAITALL) if head else b""


LOADED: dict[str, Any] = {}
F_IS_REMOTE = {"values": {"f": {"theirs": 0}}}


@pytest.mark.parametrize(
    "reply",
    [
        *(
            {},
            {"value": {"theirs": 1}},
            {"value": {"yours": 0}},
            {"value": {"yours": -1}},
            {"value": 5},
            {"value": [[4]]},
        ),
        *({"value": 4, "changed": [[0, 4]]}, {"value": 4, "changed": 7}, {"value": 4, "changed": [[9, 1]]}),
        *({"value": {"tuple": {"theirs": 0}}}, {"value": {"int": "x"}}, {"raised": ["StopIteration"]}, {"raised": 3}),
        *({"raised": ["SystemExit"]}, {"raised": ["TestFault"], "message": "x"}, {"raised": ["ImportError"]}),
        *({"passed": True}, {"done": True}, {"test": 0, "passed": True}, {"fault": "x"}, {"not_started": "x"}),
        {"value": None},
        *(b"", b"\xff" * 100, b"\0\0\0\2[]", b"\0\0\0\0", struct.pack("!I", 9) + b'{"done":1', b'{"done": true}'),
        b"\0\0\x30\0" + b"[" * 0x3000,
        {"value": {"Decimal": "sNaN"}},
        {"value": {"float": "nan"}},
    ],
    ids=range(31),
)
def test_forged_replies_fail_the_test_and_nothing_else(reply: Any) -> None:
    reports = Forger(LOADED, F_IS_REMOTE, reply).judge("assert f([2]) == 4")
    assert [report.get("passed") for report in reports[:1]] == [False]
    assert reports[1:] == [{"done": True}]
    assert not any("fault" in report for report in reports)


@pytest.mark.parametrize(
    "names", [{}, {"values": 5}, {"values": {"f": {"yours": 3}}}, {"values": {"len": 5, "tests": 1}}, b""]
)
def test_forged_names_fail_the_test(names: Any) -> None:
    reports = Forger(LOADED, names).judge("assert f(2) == 4")
    assert reports[0]["passed"] is False
    assert not any("fault" in report for report in reports)


def test_names_that_nobody_asked_for_are_not_taken() -> None:
    reports = Forger(LOADED, {"values": {"f": 4, "abs": 7, "__builtins__": {}, "g": 3}}).judge(
        "assert abs(f) == 4", "g"
    )
    assert reports[0]["passed"] is True


@pytest.mark.parametrize(
    "deed",
    [
        "os.write(3, struct.pack('!I', 2) + b'[]')",
        "os.write(3, b'garbage' * 1000)",
        "os.write(3, struct.pack('!I', 2**32 - 1) + b'x' * 1000)",
        "[os.write(n, forged) for n in range(3, 60) if is_open(n)]",
        "os.closerange(3, 60)",
        "os.write(3, deep)",
        "[os.write(3, forged) for _ in range(100)]",
        "[os.write(3, asked) for _ in range(100)]",
        "flood()",
    ],
)
def test_a_program_that_writes_to_its_judge_has_failed(deed: str) -> None:
    code = f"""
import os, struct
def frame(content): return struct.pack("!I", len(content)) + content
forged = frame(b'{{"reply": {{"passed": true, "done": true}}}}')
asked = frame(b'{{"of": 0, "args": [], "kwargs": {{}}}}')
deep = frame(b'{{"reply":' + b"[" * 100_000 + b"]" * 100_000 + b"}}")
def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False
def flood():
    while True:
        os.write(3, asked * 100)
def f(x):
    {deed}
    return 5
"""
    found = verdict(code, "assert f(2) == 4", limits=Limits(seconds=0.7))
    assert (found.value, found.status) == (0.0, ScoreStatus.OK)


@pytest.mark.parametrize(
    "answer",
    [
        "10 ** 10 ** 7",
        "'x' * 10 ** 9",
        "range(10 ** 18)",
        "[[0] * 1000] * 100_000",
        "{n * (2 ** 61 - 1): n for n in range(20_000)}",
        "deep(5000)",
        "deep(101)",
        "Decimal('1E+999999999999')",
        "[nan] * 10",
        "{(i,) * 50 for i in range(100_000)}",
        "itertools.count()",
        "itself()",
    ],
)
def test_values_that_are_too_much_fail(answer: str) -> None:
    code = f"""
import itertools
from decimal import Decimal
from math import nan
def deep(n):
    value = []
    for _ in range(n): value = [value]
    return value
def itself():
    value = []; value.append(value); return value
def f(x): return {answer}
"""
    found = verdict(code, "assert sorted(f(2)) == [4] or list(f(2)) == [4] or f(2) == 4", limits=Limits(seconds=0.7))
    assert (found.value, found.status) == (0.0, ScoreStatus.OK)


def test_tests_that_share_nothing() -> None:
    """Each test has its own names, with the setup's as they were; the program keeps what it is."""
    assert passes(
        "n = 0\ndef f():\n    global n\n    n += 1\n    return n",
        "table.append(1)\nmine = 5\nassert f() == 1 and table == [1]",
        "assert table == [] and f() == 2\ntry:\n    mine\n    assert False\nexcept NameError:\n    pass",
        setup="table = []",
    )


def test_which_names_a_suite_wants() -> None:
    suite = read_suite(
        "import math\ndef own(x): return helper(x)",
        ["assert f(2) == [g for g in range(h)]", "x = 1\ndef k(): return x + y\nassert string.digits", "assert string"],
        ["check"],
    )
    assert suite.wanted == ({"f", "h", "helper", "check"}, {"y", "helper", "check"}, {"helper", "check"})
    assert suite.modules == {"string"}
    with pytest.raises(TestFault, match="test 2 is no Python"):
        read_suite("", ["assert f()", "="], [])


def test_asserts_stay_in_optimised_interpreters() -> None:
    assert os.environ.get("PYTHONOPTIMIZE") is None
    code = read_suite("", ["assert False"], []).tests[0]
    with pytest.raises(AssertionError):
        exec(code, {})
