"""The tests' end of the talk: tests run here, in a process of their own, and never see the program itself.

Names that tests use and nobody defines are the program's: a `Remote` each. Names of the standard library's modules are
those modules, and built-in names are the built-in ones, whatever the program calls its functions.
"""

import ast
import builtins
import symtable
import sys
import traceback
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

from towline.rollout.sandbox.peer import Peer, PeerGone, carried_exception, describe_exception
from towline.rollout.sandbox.remote import Remote
from towline.rollout.sandbox.values import Json, NotPlain, decode, encode

MAX_DETAIL_CHARS = 300
PROGRAM_ENDED = "the program ended"
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, partial)
_NOTHING = compile("", "<nothing>", "exec")
Report = Callable[[dict[str, Any]], None]


class TestFault(BaseException):
    """The tests are wrong, not the program. Not an Exception: no test is to catch it."""

    __test__ = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    setup: CodeType
    tests: tuple[CodeType, ...]
    wanted: tuple[frozenset[str], ...]
    """For each test: the names it and the setup take from the program."""
    is_setup_alone: bool
    """The setup takes none, so that what goes wrong in it is its own fault."""
    modules: frozenset[str]
    """Names that stand for modules of the standard library."""


def read_suite(setup: str, tests: list[str], entry_points: list[str]) -> Suite:
    """
    Args:
        entry_points: names that are the program's even where the setup defines them.

    Raises:
        TestFault: one of them is no Python, or empty.
    """
    modules: set[str] = set()
    compiled, wanted = [], []
    setup_code, setup_free, setup_bound = _read(setup, "the setup", modules)
    for place, test in enumerate(tests, start=1):
        code, free, bound = _read(test, f"test {place}", modules)
        if code.co_code == _NOTHING.co_code:
            raise TestFault(f"test {place} tests nothing")
        compiled.append(code)
        own = frozenset(entry_points)
        wanted.append(frozenset((free | setup_free) - bound - setup_bound - modules - own) | own)
    return Suite(
        setup=setup_code,
        tests=tuple(compiled),
        wanted=tuple(wanted),
        is_setup_alone=setup_free <= setup_bound | modules,
        modules=frozenset(modules),
    )


def _read(source: str, name: str, modules: set[str]) -> tuple[CodeType, set[str], set[str]]:
    """Code, names that it uses and does not define, and names that it defines."""
    try:
        # Asserts stay, however this interpreter was started.
        code = compile(source, f"<{name}>", "exec", dont_inherit=True, optimize=0)
        table = symtable.symtable(source, f"<{name}>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise TestFault(f"{name} is no Python: {type(error).__name__}: {error}") from None
    bound = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    free = {name for name in _globals_used(table) if name not in bound and not hasattr(builtins, name)}
    modules |= {name for name in free & sys.stdlib_module_names if _is_used_as_module(ast.parse(source), name)}
    return code, free, bound


def _globals_used(table: symtable.SymbolTable) -> Iterator[str]:
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (is_module or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from _globals_used(child)


def _is_used_as_module(tree: ast.AST, name: str) -> bool:
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))
    as_module = sum(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        for node in ast.walk(tree)
    )
    return uses == as_module


class Judge:
    def __init__(self, descriptor: int, report: Report) -> None:
        """
        Args:
            descriptor: where the program answers.
            report: is told `{"fault": why}`, `{"not_loaded": why}` or, test by test, `{"test": place, "passed": ...,
                "detail": why}`; at last `{"done": True}`.
        """
        self._peer = Peer(descriptor, self._serve)
        self._report = report
        self._remotes: dict[int, Remote] = {}
        self._callbacks: list[Callable[..., Any]] = []
        self._has_answered = False
        """In this test. From then on what goes wrong may be the program's doing, so that no program can have its tests
        blamed."""

    def run(self, setup: str, tests: list[str], entry_points: list[str], *, stop_at_first: bool) -> None:
        try:
            suite = read_suite(setup, tests, entry_points)
            if (why := self._load()) is not None:
                self._report({"not_loaded": why[:MAX_DETAIL_CHARS]})
                return
            for place in range(len(tests)):
                detail = self._run_test(suite, place)
                self._report({"test": place, "passed": detail is None, "detail": (detail or "")[:MAX_DETAIL_CHARS]})
                if detail is not None and stop_at_first:
                    return
            self._report({"done": True})
        except TestFault as fault:
            self._report({"fault": str(fault)[:MAX_DETAIL_CHARS]})

    def _load(self) -> str | None:
        try:
            reply = self._peer.ask({"do": "load"})
        except PeerGone as gone:
            return f"the program {gone}"
        return _said(reply) if "raised" in reply else None

    def _run_test(self, suite: Suite, place: int) -> str | None:
        """Why it failed; None if it passed.

        Raises:
            TestFault: it could not be run.
        """
        namespace: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
        self._has_answered = False
        try:
            of_program = self._from_program(suite.wanted[place])
            namespace |= of_program
            self._execute_setup(suite, namespace)
            namespace |= of_program  # entry points that the setup defines too
            exec(suite.tests[place], namespace)
        except PeerGone as gone:
            return f"the program {gone}"
        except TestFault:
            raise
        except BaseException as error:  # tests may raise what they like
            if isinstance(error, ImportError) and not self._has_answered:
                raise TestFault(f"test {place + 1} cannot be run: {error}") from None
            what = f"{'the program raised ' if _is_carried(error) else ''}{_said(describe_exception(error))}"
            return f"{what}{_line_at(error, suite.tests[place])}"
        # A bare `except` in a test does not hide that the program is gone.
        return f"the program {self._peer.why_gone}" if self._peer.why_gone else None

    def _execute_setup(self, suite: Suite, namespace: dict[str, Any]) -> None:
        try:
            namespace |= {name: __import__(name) for name in suite.modules}
            exec(suite.setup, namespace)
        except BaseException as error:
            if not suite.is_setup_alone:
                raise
            raise TestFault(f"the setup cannot be run: {_said(describe_exception(error))}") from None

    def _from_program(self, names: frozenset[str]) -> dict[str, Any]:
        if not names:
            return {}
        values = self._checked(self._peer.ask({"do": "names", "names": sorted(names)}))["values"]
        if not isinstance(values, dict):
            raise NotPlain("no proper reply")
        return {name: decode(value, self._resolve) for name, value in values.items() if name in names}

    def _ask(self, target: Remote, what: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            request = {
                "do": what,
                "of": object.__getattribute__(target, "_number"),
                "args": [encode(one, self._refer) for one in args],
                "kwargs": {name: encode(one, self._refer) for name, one in kwargs.items()},
            }
        except (NotPlain, RecursionError) as error:
            why = f"an argument cannot be given to the program: {error}"
            raise (NotPlain(why) if self._has_answered else TestFault(why)) from None
        reply = self._checked(self._answer(request))
        for place, now in reply.get("changed", []):
            _become(args[place], decode(now, self._resolve))
        return decode(reply["value"], self._resolve)

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        self._has_answered = True
        return self._peer.ask(request)

    def _checked(self, reply: dict[str, Any]) -> dict[str, Any]:
        if "raised" in reply:
            error = carried_exception(reply)
            error.__dict__["is_carried"] = True
            raise error
        return reply

    def _serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """The program calls a function that a test gave it; nothing else can it ask for."""
        try:
            function = self._callbacks[request["of"]]
            args = [decode(one, self._resolve) for one in request["args"]]
            kwargs = {name: decode(one, self._resolve) for name, one in request["kwargs"].items()}
            return {"value": encode(function(*args, **kwargs), self._refer_result)}
        except Exception as error:
            return describe_exception(error)

    def _refer(self, value: object) -> Json:
        if isinstance(value, Remote):
            return {"yours": object.__getattribute__(value, "_number")}
        if isinstance(value, KeysView | ValuesView | ItemsView):
            return encode(list(value), self._refer)
        if not callable(value):
            raise NotPlain(f"it has an object of class {type(value).__name__}; only plain values and functions can be")
        self._callbacks.append(value)
        return {"theirs": len(self._callbacks) - 1}

    def _refer_result(self, value: object) -> Json:
        """What a test's function made of the program's arguments: a class or an object with a `__call__` may hold
        operators of the program's, and would come back as the answer."""
        if isinstance(value, Remote) or type(value) in _FUNCTIONS:
            return self._refer(value)
        raise NotPlain(f"the test's function returned an object of class {type(value).__name__}")

    def _resolve(self, whose: str, number: int) -> object:
        if whose == "yours":
            if not 0 <= number < len(self._callbacks):
                raise NotPlain("a reference to nothing")
            return self._callbacks[number]
        if number not in self._remotes:  # whatever the number: it is for the program to know it
            self._remotes[number] = Remote(self._ask, number)
        return self._remotes[number]


def _become(argument: Any, now: Any) -> None:
    """The program changed an argument in place: so do we."""
    if type(argument) is not type(now):
        raise NotPlain("an argument became another type")
    if isinstance(argument, list | bytearray | deque):
        argument.clear()
        argument.extend(now)
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(now)


def _said(reply: dict[str, Any]) -> str:
    names, message = reply.get("raised"), str(reply.get("message", "")).strip()
    name = str(names[0]) if isinstance(names, list) and names else "an exception"
    return f"{name}: {message}" if message else name


def _line_at(error: BaseException, test: CodeType) -> str:
    """Which line of a test of several, for people."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    lines = [line for name, line in frames if name == test.co_filename]
    return f" at line {lines[-1]}" if lines and lines[-1] > 1 else ""


def _is_carried(error: BaseException) -> bool:
    return getattr(error, "is_carried", False) is True


def rehearse() -> None:
    """Touch what judging needs, so that a copied process has its own pages of it before anybody waits."""
    suite = read_suite("import math", ["assert f([2], 'x') == {1: (2.5,)}"], [])
    encode(decode(encode([suite.wanted[0]], lambda _: None), lambda *_: None), lambda _: None)
