"""A program that reads standard input and prints: run as `python solution.py` would be, in a copy of the zygote."""

import atexit
import os
import sys
import threading
import traceback
from types import ModuleType
from typing import NoReturn


def run_as_main(code: str) -> NoReturn:
    """Exit codes are those of the interpreter."""
    sys.argv[:] = ["solution.py"]
    module = sys.modules["__main__"] = ModuleType("__main__")
    status = 0
    try:
        exec(compile(code, "solution.py", "exec", dont_inherit=True), vars(module))
    except SystemExit as end:
        status = _exit_status(end.code)
    except BaseException:
        traceback.print_exc(limit=-5)
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does at its end
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        status = status or 1
    os._exit(status)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
