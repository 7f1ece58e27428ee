"""A program that reads standard input and prints: run as `python solution.py` would be, in a copy of the zygote."""

import atexit
import builtins
import gc
import os
import sys
import threading
from _sitebuiltins import Quitter
from contextlib import suppress
from types import ModuleType
from typing import Any, NoReturn

FLUSH_FAILED = 120
"""The interpreter's exit code if what was printed last did not go out."""


def add_exit_functions() -> None:
    """Programs expect them among the built-in functions, where `site` puts them."""
    for name in ("exit", "quit"):
        setattr(builtins, name, Quitter(name, "Ctrl-D (i.e. EOF)"))


def run_as_main(code: str) -> NoReturn:
    """Exit codes are those of the interpreter."""
    sys.argv[:] = ["solution.py"]
    module = sys.modules["__main__"] = ModuleType("__main__")
    status = 1
    with suppress(BaseException):
        status = _run(code, module)
    with suppress(BaseException):
        status = _finish(module) or status
    os._exit(status)


def _run(code: str, module: ModuleType) -> int:
    try:
        try:
            exec(compile(code, "solution.py", "exec", dont_inherit=True), vars(module))
        except SystemExit:
            raise
        except BaseException as error:
            below_us = error.__traceback__ and error.__traceback__.tb_next
            sys.excepthook(type(error), error.with_traceback(below_us), below_us)
            return 1
    except SystemExit as end:  # of an excepthook, too
        return _exit_status(end.code)
    return 0


def _finish(module: ModuleType) -> int:
    """What the interpreter does at its end: it waits for threads, and files that were left open are written."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    standard = [sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__]
    status = 0 if all([_is_flushed(file) for file in standard[:2]]) else FLUSH_FAILED
    vars(module).clear()
    gc.collect()
    return status if all([_is_flushed(file) for file in standard]) else FLUSH_FAILED


def _is_flushed(file: Any) -> bool:
    try:
        if file is not None and not file.closed:
            file.flush()
    except Exception:
        return False
    return True


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    print(code, file=sys.stderr)
    return 1
