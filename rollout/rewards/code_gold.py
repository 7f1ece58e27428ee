"""The tests that come with a coding task, out of the text of a dataset's answer field. Forms are in docs/rewards.md."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from towline.storage.errors import DataError

_MBPP_ALSO = {"task_id", "text", "prompt", "code", "source_file", "challenge_test_list"}
_HUMANEVAL_ALSO = {"task_id", "canonical_solution"}


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionTests:
    tests: tuple[str, ...]
    setup: str = ""
    """Run before each test."""
    entry_points: tuple[str, ...] = ()
    """Names that are the program's, even where the setup defines them."""
    prompt: str = ""
    """Code that the program goes on from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioCases:
    cases: tuple[tuple[str, str], ...]
    """Standard input, expected standard output."""


def read_gold(gold: str) -> FunctionTests | StdioCases:
    """
    Raises:
        DataError: it is none of the forms, or has no tests.
    """
    try:
        value = json.loads(gold)
    except (ValueError, RecursionError) as error:
        raise _bad(f"it is no JSON ({error})", gold) from None
    if isinstance(value, list):
        value = {"tests": value}
    if not isinstance(value, dict):
        raise _bad("it is neither a list nor an object", gold)
    if "tests" in value:
        _no_others(value, {"tests", "setup", "entry_points"}, gold)
        return FunctionTests(
            tests=_texts(value, "tests", gold),
            setup=_text(value, "setup", gold),
            entry_points=_texts(value, "entry_points", gold) if "entry_points" in value else (),
        )
    if "test_list" in value:
        _no_others(value, {"test_list", "test_imports", "test_setup_code"} | _MBPP_ALSO, gold)
        imports = _texts(value, "test_imports", gold) if value.get("test_imports") else ()
        setup = "\n".join([*imports, _text(value, "test_setup_code", gold)])
        return FunctionTests(tests=_texts(value, "test_list", gold), setup=setup)
    if "entry_point" in value and "test" in value:
        _no_others(value, {"prompt", "test", "entry_point"} | _HUMANEVAL_ALSO, gold)
        name = _text(value, "entry_point", gold)
        if not name.isidentifier():
            raise _bad(f"entry_point {name!r} is no name", gold)
        prompt = _text(value, "prompt", gold)
        test = f"{_text(value, 'test', gold)}\n\ncheck({name})\n"
        return FunctionTests(tests=(test,), setup=prompt, entry_points=(name,), prompt=prompt)
    if "inputs" in value and "outputs" in value:
        _no_others(value, {"inputs", "outputs"}, gold)
        inputs, outputs = _texts(value, "inputs", gold), _texts(value, "outputs", gold)
        if len(inputs) != len(outputs):
            raise _bad(f"it has {len(inputs)} inputs and {len(outputs)} outputs", gold)
        return StdioCases(cases=tuple(zip(inputs, outputs, strict=True)))
    raise _bad("it has none of tests, test_list, test with entry_point, inputs with outputs", gold)


def _no_others(value: Mapping[str, Any], known: set[str], gold: str) -> None:
    if others := sorted(value.keys() - known):
        raise _bad(f"{others[0]} is not a field of this form", gold)


def _text(value: Mapping[str, Any], name: str, gold: str) -> str:
    found = value.get(name, "")
    if not isinstance(found, str):
        raise _bad(f"{name} is no string", gold)
    return found


def _texts(value: Mapping[str, Any], name: str, gold: str) -> tuple[str, ...]:
    found = value[name]
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise _bad(f"{name} is not a list of one or more strings", gold)
    return tuple(found)


def _bad(why: str, gold: str) -> DataError:
    return DataError(f"the gold answer has no tests to run: {why}; docs/rewards.md lists the forms: {gold[:200]!r}")
