"""What tests of functions may do, what passes them, and whose fault it is when they cannot be run."""

import json

import pytest

from towline.rollout.rewards.code_tests import CodeTests, grade, run_stdio, run_tests
from towline.rollout.rewards.verdict import Verdict
from towline.rollout.sandbox.limits import Limits
from towline.storage.errors import DataError
from towline.storage.records import ScoreStatus

RIGHT = "def half(number): return number // 2"
PASSED = Verdict(value=1.0)


@pytest.mark.parametrize(
    ("tests", "setup", "why"),
    [
        ([], "", "there are no tests"),
        ([""], "", "test 1 tests nothing"),
        (["assert half(4) == 2", "# assert half(6) == 3\n"], "", "test 2 tests nothing"),
        (["assert half(4 == 2"], "", "test 1 is no Python"),
        (["assert half(4) == 2", "assert half(6) = 3"], "", "test 2 is no Python"),
        (["assert half(4) == 2\0"], "", "test 1 is no Python"),
        (["assert half(4) == '\ud800'"], "", "test 1 is no Python"),
        (["assert half(4) == " + "(" * 5000], "", "test 1 is no Python"),
        (["assert half(4) == 2"], "numbers = [", "the setup is no Python"),
        (["assert half(4) == 2"], "raise ValueError('no numbers')", "the setup cannot be run: ValueError: no numbers"),
        (["assert half(4) == 2"], "numbers = [][0]", "the setup cannot be run: IndexError"),
        (["assert half(4) == 2"], "raise SystemExit(0)", "the setup cannot be run: SystemExit"),
        (["assert half(4) == 2"], "import nonesuch", "the setup cannot be run: ModuleNotFoundError"),
        (["assert half(4) == 2"], "assert 1 == 2", "the setup cannot be run: AssertionError"),
        (["import nonesuch\nassert half(4) == 2"], "", "test 1 cannot be run: No module named 'nonesuch'"),
        (["from math import nonesuch"], "", "test 1 cannot be run: cannot import name"),
        (["assert half(4) == 2", "import nonesuch"], "", "test 2 cannot be run"),
        (["assert half(object()) == 2"], "", "an argument cannot be given"),
    ],
)
@pytest.mark.parametrize("partial_credit", [False, True])
def test_tests_at_fault_give_no_value(tests: list[str], setup: str, why: str, partial_credit: bool) -> None:
    found = run_tests(RIGHT, tests, setup=setup, partial_credit=partial_credit)
    assert (found.value, found.status) == (None, ScoreStatus.FAILED)
    assert found.detail.startswith("gold_unusable: ")
    assert why in found.detail


def test_cases_at_fault_give_no_value() -> None:
    assert run_stdio("print(1)", []) == Verdict(
        value=None, status=ScoreStatus.FAILED, detail="gold_unusable: there are no cases"
    )
    with pytest.raises(DataError, match="no tests to run"):
        grade(RIGHT, "[]")


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import nonesuch\n" + RIGHT, "does not load: ModuleNotFoundError: No module named 'nonesuch'"),
        (
            "def half(number):\n    import nonesuch",
            "the program raised ModuleNotFoundError: No module named 'nonesuch'",
        ),
        ("def half(number): raise ImportError('mine')", "the program raised ImportError: mine"),
        ("def third(number): return number // 3", "NameError: name 'half' is not defined"),
        ("half = 2", "TypeError: 'int' object is not callable"),
        ("def half(): return 2", "the program raised TypeError: half() takes 0 positional arguments but 1 was given"),
        ("def half(number): return number / 0", "the program raised ZeroDivisionError: division by zero"),
        ("class Mine(Exception): pass\ndef half(number): raise Mine('why')", "Mine: why"),
        ("def half(number): return 3", "AssertionError"),
        ("def half(number): return None", "AssertionError"),
        ("def half(number): return '2'", "AssertionError"),
        ("def half(number): yield 2", "an object of the program is compared"),
        ("async def half(number): return 2", "an object of the program is compared"),
        ("half = lambda number: half", "an object of the program is compared"),
    ],
)
def test_programs_at_fault_get_nothing_and_are_told_why(code: str, why: str) -> None:
    found = run_tests(code, ["assert half(4) == 2", "assert half(7) == 3"])
    assert (found.value, found.status) == (0.0, ScoreStatus.OK)
    assert why in found.detail


@pytest.mark.parametrize(
    ("code", "tests", "setup"),
    [
        # MBPP's tests use modules that nobody imports.
        ("def area(r): return 3.141592653589793 * r * r", ["assert math.isclose(area(1), math.pi)"], ""),
        ("def half(n): return n / 2", ["assert math.isclose(half(3), 1.5, rel_tol=1e-9)"], ""),
        ("def pick(xs): return xs[0]", ["assert pick([1, 2]) in [1, 2]", "assert set([pick([1])]) == {1}"], ""),
        ("def word(t): return t[:2]", ["assert re.fullmatch('[a-z]+', word('abc'))", "assert word('abc') == 'ab'"], ""),
        # In Python a function of the tests' own is theirs.
        ("def near(a, b): return True\ndef half(n): return n / 2", ["assert near(half(3), 1.5)"],
         "def near(a, b): return abs(a - b) < 1e-9"),
        ("def half(n): return n / 2", ["assert half(LARGE) == LARGE / 2"], "LARGE = 10**9"),
        ("def half(n): return n // 2", ["for n in range(50): assert half(2 * n) == n"], ""),
        ("def half(n): return n // 2", ["assert [half(n) for n in (2, 4)] == [1, 2]",
                                       "assert list(map(half, [2, 4])) == [1, 2]"], ""),
        ("def half(n): return n // 2", ["def check(f):\n    assert f(2) == 1\ncheck(half)"], ""),
        # Arguments that are changed in place.
        ("def sort(xs): xs.sort()", ["xs = [3, 1, 2]\nsort(xs)\nassert xs == [1, 2, 3]"], ""),
        ("def sort(xs): xs.sort()", ["sort(SHARED)\nassert SHARED == [1, 2]"] * 2, "SHARED = [2, 1]"),
        ("def put(d, k): d[k] = len(d)", ["d = {'a': 0}\nput(d, 'b')\nassert d == {'a': 0, 'b': 1}"], ""),
        ("def add(s, x): s.add(x)", ["s = {1}\nadd(s, 2)\nassert s == {1, 2}"], ""),
        ("def flip(grid):\n    for row in grid: row.reverse()",
         ["grid = [[1, 2], [3, 4]]\nflip(grid)\nassert grid == [[2, 1], [4, 3]]"], ""),
        ("def clear(xs): del xs[:]", ["xs = [1]\nclear(xs)\nassert not xs"], ""),
        # Classes.
        ("class Stack:\n    def __init__(self, *items): self.items = list(items)\n"
         "    def push(self, item): self.items.append(item)\n    def pop(self): return self.items.pop()\n"
         "    def __len__(self): return len(self.items)\n    def __getitem__(self, place): return self.items[place]\n"
         "    def __bool__(self): return bool(self.items)",
         ["stack = Stack(1, 2)\nstack.push(3)\nassert stack.pop() == 3\nassert len(stack) == 2\nassert stack[0] == 1",
          "stack = Stack()\nassert not stack\nstack.push(1)\nassert stack.items == [1]",
          "stack = Stack()\ntry:\n    stack.pop()\n    assert False\nexcept IndexError:\n    pass"], ""),
        ("class Point:\n    origin = 0\n    def __init__(self, x): self.x = x\n"
         "    @property\n    def far(self): return self.x\n"
         "    @classmethod\n    def at(cls, x): return cls(x)\n    @staticmethod\n    def dimensions(): return 1",
         ["assert Point(3).far == 3", "assert Point.at(x=4).x == 4", "assert Point.dimensions() == 1",
          "point = Point(1)\npoint.x = 7\nassert point.far == 7", "assert Point.origin == 0"], ""),
        ("class Node:\n    def __init__(self, value, rest=None): self.value, self.rest = value, rest\n"
         "def total(node): return node.value + total(node.rest) if node else 0",
         ["assert total(Node(1, Node(2, Node(3)))) == 6", "node = Node(1)\nassert node.rest is None"], ""),
        # Functions as arguments and as results, generators.
        ("def apply(f, x): return f(f(x))", ["assert apply(lambda x: x + 1, 0) == 2"], ""),
        ("def adder(n): return lambda x: x + n",
         ["assert adder(2)(3) == 5", "assert [*map(adder(1), [1, 2])] == [2, 3]"], ""),
        ("def count(n):\n    for i in range(n): yield i",
         ["assert list(count(3)) == [0, 1, 2]", "assert sum(count(4)) == 6", "assert next(count(1)) == 0"], ""),
        ("def fail(): raise KeyError('k')", ["try:\n    fail()\n    assert False\nexcept KeyError: pass"], ""),
        ("class Mine(ValueError): pass\ndef fail(): raise Mine('m')",
         ["try:\n    fail()\n    assert False\nexcept ValueError as error: assert 'm' in str(error)"], ""),
        ("import unittest", ["class T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 1)"], ""),
        # Values of all kinds.
        ("def same(x): return x", ["assert same((1, [2.5, None], {'a': {1, 2}})) == (1, [2.5, None], {'a': {1, 2}})",
                                   "assert same(b'x') == b'x' and same(1j) == 1j and same(True) is True",
                                   "assert type(same((1,))) is tuple and type(same([1])) is list",
                                   "assert same({(1, 2): frozenset([3])}) == {(1, 2): frozenset([3])}",
                                   "assert same(float('inf')) > 1 and same(float('nan')) != same(float('nan'))",
                                   "assert same(10**50) == 10**50 and same('\\u00e9\\n') == '\\u00e9\\n'"], ""),
        ("from fractions import Fraction as F\nimport datetime\ndef third(): return F(1, 3)\n"
         "def day(): return datetime.date(2024, 2, 29)",
         ["from fractions import Fraction\nassert third() == Fraction(1, 3)", "assert day().year == 2024"], ""),
        # State between calls, as in Python.
        ("calls = []\ndef count():\n    calls.append(1)\n    return len(calls)", ["assert count() == 1",
                                                                              "assert count() == 2"], ""),
    ],
)  # fmt: skip
def test_right_programs_pass(code: str, tests: list[str], setup: str) -> None:
    assert run_tests(code, tests, setup=setup) == PASSED


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("def sort(xs): return sorted(xs)", "xs = [2, 1]\nsort(xs)\nassert xs == [1, 2]"),
        ("def sort(xs): xs.clear()", "xs = [2, 1]\nsort(xs)\nassert xs == [1, 2]"),
        ("def pair(x): return [x, x]", "assert pair(1) == (1, 1)"),
        ("def yes(): return 1", "assert yes() is True"),
        ("def near(): return 0.1 + 0.2", "assert near() == 0.3"),
        (
            "class Stack:\n    def pop(self): return 0",
            "try:\n    Stack().pop()\n    assert False\nexcept IndexError: pass",
        ),
        ("class Stack:\n    def pop(self): raise KeyError", "try:\n    Stack().pop()\nexcept IndexError: pass"),
        ("class P:\n    def __eq__(self, other): return True", "assert P() == P()"),
        ("def count(n): return iter(())", "assert list(count(3)) == [0, 1, 2]"),
        ("def apply(f, x): return f(x)", "assert apply(lambda x: x + 1, 0) == 2"),
        ("def gone(): import os; os._exit(0)", "try: gone()\nexcept BaseException: pass"),
    ],
)
def test_wrong_programs_fail(code: str, test: str) -> None:
    assert run_tests(code, [test]).value == 0.0


@pytest.mark.parametrize(
    ("code", "value", "why"),
    [
        ("def f(x): return x", 1.0, ""),
        ("def f(x): return x if x != 3 else 0", 0.75, "test 3 of 4: AssertionError; 3 of 4 passed"),
        ("def f(x): return 1", 0.25, "test 2 of 4: AssertionError; 1 of 4 passed"),
        ("def f(x): return 0", 0.0, "test 1 of 4: AssertionError; 0 of 4 passed"),
        ("def f(x): return x if x != 2 else 1 // 0", 0.75, "test 2 of 4: the program raised ZeroDivisionError"),
        # What is gone passes no more tests.
        ("import os\ndef f(x): return x if x != 2 else os._exit(0)", 0.25, "test 2 of 4: the program ended"),
        ("import os\ndef f(x): return x if x != 4 else os._exit(0)", 0.75, "test 4 of 4: the program ended"),
        ("import ctypes\ndef f(x): return x if x != 3 else ctypes.string_at(0)", 0.5, "test 3 of 4: the program ended"),
        ("def f(x):\n    while x == 3: pass\n    return x", 0.5, "not done within 1 s; 2 of 4 passed"),
        ("def f(x) return x", 0.0, "does not load: SyntaxError"),
    ],
)
def test_partial_credit_is_the_share_of_tests_passed(code: str, value: float, why: str) -> None:
    tests = [f"assert f({number}) == {number}" for number in (1, 2, 3, 4)]
    found = run_tests(code, tests, Limits(seconds=1.0), partial_credit=True)
    assert (found.value, found.status) == (value, ScoreStatus.OK)
    assert why in found.detail
    assert run_tests(code, tests, Limits(seconds=1.0)).value == float(value == 1.0)


def test_a_program_that_ends_with_the_last_test_has_not_passed_it() -> None:
    """All calls are answered; then the process goes while the last test still runs."""
    code = "import os, threading\ndef f(x):\n    if x == 2: threading.Timer(0.05, os._exit, [0]).start()\n    return x"
    tests = ["assert f(1) == 1", "assert f(2) == 2\nwhile True: assert f(1) == 1"]
    found = run_tests(code, tests, partial_credit=True)
    assert (found.value, "test 2 of 2: the program ended" in found.detail) == (0.5, True)
    assert run_tests(code, tests).value == 0.0


def test_partial_credit_of_standard_input_is_the_share_of_cases() -> None:
    cases = [(f"{number}\n", f"{number}\n") for number in (1, 2, 3, 4)]
    code = "x = int(input())\nprint(x if x != 2 else 1 // 0)"
    found = run_stdio(code, cases, partial_credit=True)
    assert (found.value, "case 2 of 4: exit code 1, ZeroDivisionError" in found.detail) == (0.75, True)
    assert run_stdio(code, cases).value == 0.0
    loop = "x = int(input())\nwhile x == 3: pass\nprint(x)"
    found = run_stdio(loop, cases, Limits(seconds=1.0), partial_credit=True)
    assert (found.value, "case 3 of 4: not done within 1 s; 2 of 4 passed" in found.detail) == (0.5, True)


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("print(2)", 1.0),
        ("print(2)\nraise SystemExit", 1.0),
        ("print(2)\nraise SystemExit(0)", 1.0),
        ("import sys\nprint(2)\nsys.exit(1)", 0.0),
        ("print(2)\nraise ValueError", 0.0),
        ("import os\nprint(2, flush=True)\nos._exit(3)", 0.0),
        ("import os\nprint(2, flush=True)\nos.abort()", 0.0),
        ("import sys\nprint(2, file=sys.stderr)", 0.0),
        ("import sys\nprint('log', file=sys.stderr)\nprint(2)", 1.0),
        ("import atexit\natexit.register(print, 2)", 1.0),
        ("import threading\nthreading.Timer(0.05, print, [2]).start()", 1.0),
        ("if __name__ == '__main__': print(2)", 1.0),
        ("import sys\nsys.stdout.write('2')", 1.0),
        ("import os\nos.close(1)", 0.0),
        ("print(2); print(3)", 0.0),
    ],
)
def test_programs_print_and_end_with_exit_code_nought(code: str, value: float) -> None:
    assert run_stdio(code, [("", "2\n")]).value == value


def test_options_of_the_reward_are_those_of_its_runs() -> None:
    tests = json.dumps(["assert f(1) == 1", "assert f(2) == 2"])
    code = "def f(x): return 1"
    assert CodeTests(partial_credit=True)(code, tests).value == 0.5
    assert CodeTests()(code, tests).value == 0.0
    cases = json.dumps({"inputs": ["1", "2"], "outputs": ["1", "2"]})
    assert CodeTests(partial_credit=True)("print(1)", cases).value == 0.5
    slow = CodeTests(limits=Limits(seconds=0.3))("def f(x):\n    while True: pass", tests)
    assert "not done within 0.3 s" in slow.detail


@pytest.mark.parametrize("gold", ['["assert f(1) == 1"]', '{"inputs": [""], "outputs": ["1"]}'])
@pytest.mark.parametrize(
    "completion", ["", "<think>def f(x): return x", "```python\ndef f(x): return x", "```js\n1\n```"]
)
def test_no_code_is_a_wrong_answer(gold: str, completion: str) -> None:
    assert grade(completion, gold) == Verdict(value=0.0, detail="no code")


def test_each_program_finds_the_interpreter_as_if_it_were_new() -> None:
    code = "import random, threading\nnumber = random.random()\ndef found(): return number\n"
    shown = "number, threading.main_thread() is threading.current_thread(), threading.active_count()"
    first, again = (run_stdio(f"{code}print({shown})", [("", "")]) for _ in range(2))
    assert first == again
    assert "True 1" in first.detail
    assert run_tests(f"{code}random.seed(1)\nrandom.foreign = 1", ["assert 0 <= found() < 1"]) == PASSED
    assert run_tests(f"{code}foreign = hasattr(random, 'foreign')", ["assert not foreign"]) == PASSED


TREE = "class Node:\n    def __init__(self, value):\n        self.value, self.left = value, None\n"
DEPTH = "def depth(node): return 0 if node is None else 1 + depth(node.left)"


def test_a_setup_may_build_what_it_needs_from_the_program() -> None:
    """As MBPP's setups of trees do."""
    setup, tests = "root = Node(1)\nroot.left = Node(2)", ["assert depth(root) == 2"]
    assert run_tests(TREE + DEPTH, tests, setup=setup) == PASSED
    wrong = run_tests(TREE + "def depth(node): return 1", tests, setup=setup)
    assert (wrong.value, wrong.status) == (0.0, ScoreStatus.OK)


@pytest.mark.parametrize("code", [DEPTH, "class Node:\n    pass\n" + DEPTH, "Node = 3\n" + DEPTH])
def test_a_program_that_lacks_what_the_setup_needs_is_wrong_and_not_without_a_verdict(code: str) -> None:
    verdict = run_tests(code, ["assert depth(root) == 1"], setup="root = Node(1)")
    assert (verdict.value, verdict.status) == (0.0, ScoreStatus.OK)
