"""A program run on its own behaves as `python solution.py` does: compared with the interpreter itself."""

import subprocess
import sys
import time

import pytest

from towline.rollout.sandbox.limits import Limits
from towline.rollout.sandbox.program import FLUSH_FAILED
from towline.rollout.sandbox.sandbox import ProgramOutcome, sandbox

STDIN = b"abc\ndef\n"
LIMITS = Limits(seconds=20)


def run(code: str, stdin: bytes = STDIN, limits: Limits = LIMITS) -> ProgramOutcome:
    return sandbox().run_program(code, stdin, limits)


PROGRAMS = [
    "print(1)",
    "raise SystemExit",
    "import sys; sys.exit(3)",
    "import sys; sys.exit('text')",
    "import sys; sys.exit(None)",
    "import sys; sys.exit(256)",
    "import sys; sys.exit(-1)",
    "import sys; sys.exit(2**70)",
    "import sys; sys.exit([1])",
    "import sys; sys.exit(True)",
    "import sys; sys.exit(0.0)",
    "import sys; sys.exit(sys.stdin.readline())",
    "exit(4)",
    "quit()",
    "print(1); exit()",
    "1 / 0",
    "assert False",
    "x = (",
    "x = '\\udcff'; print(x)",
    "raise Exception('\\udcff')",
    "import os; os._exit(7)",
    "import os; os.abort()",
    "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "import sys; print(1); sys.stdout.close()",
    "import sys; print(1); sys.stdout = None",
    "import sys; sys.stdout.detach()",
    "import os; print(1); os.close(1)",
    "import os; print(1, flush=True); os.close(1)",
    "import sys; sys.stderr.close(); 1 / 0",
    "import sys; sys.excepthook = lambda *a: print('hook'); 1 / 0",
    "import sys; sys.excepthook = lambda *a: sys.exit(0); 1 / 0",
    "import atexit; atexit.register(print, 'bye'); print('hello')",
    "import atexit; atexit.register(lambda: 1 / 0); print(1)",
    "import atexit, sys; atexit.register(lambda: sys.exit(5)); print(1)",
    "import atexit, os; atexit.register(lambda: os._exit(5)); print(1)",
    "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('late'))).start()\nprint('main')",
    "import threading; threading.Thread(target=lambda: 1 / 0).start()",
    "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True).start(); print(1)",
    "import threading\nthreading.stack_size(2**26)\nt = threading.Thread(target=print, args=[1])\nt.start(); t.join()",
    "from concurrent.futures import *\nwith ThreadPoolExecutor(2) as e: print(list(e.map(abs, [-1, 2])))",
    "from concurrent.futures import *\nThreadPoolExecutor(2).submit(print, 'x')",
    "import asyncio\nasync def f(): await asyncio.sleep(0); print(1)\nasyncio.run(f())",
    "class A:\n    def __del__(self): print('deleted')\na = A()",
    "f = open(1, 'w'); f.write('left open')",
    "import sys; sys.stdout.write('no newline')",
    "import sys; sys.stderr.write('e'); print(2)",
    "import sys, os; sys.stdout = os.fdopen(1, 'w', 1 << 20); print(5)",
    "import sys, io; sys.stdout = io.StringIO(); print(5)",
    "import sys, io, atexit, os\nb = io.BytesIO()\nsys.stdout = io.TextIOWrapper(b)\n"
    "atexit.register(lambda: (sys.stdout.flush(), os.write(1, b.getvalue())))\nprint(5)",
    "import os; os.write(1, b'x'); print('y')",
    "print(input(), input())",
    "input(); input(); input()",
    "import sys; print(sys.stdin.buffer.read())",
    "import sys; sys.stdout.buffer.write(sys.stdin.buffer.readline())",
    "print(open(0).read())",
    "import os; print(os.read(0, 3), os.read(0, 100), os.read(0, 1))",
    "for line in __import__('sys').stdin: print(line, end='')",
    "import fileinput; print(list(fileinput.input('-')))",
    "print(__name__)",
    "print(__debug__, __import__('sys').flags.optimize)",
    "import __main__; x = 3; print(__main__.__name__, __main__.x)",
    "def main():\n    global x\n    x = 5\nmain(); print(x)",
    "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)",
    "from dataclasses import dataclass\n@dataclass\nclass A: x: int = 1\nprint(A())",
    "from __future__ import annotations\ndef f(x: Nothing): return 1\nprint(f(1))",
    "x: int = 1; print(__annotations__)",
    "print('\\u00e9\\U0001f600')",
    "import sys; print(sys.stdout.encoding, sys.stdin.encoding)",
    "def f(): return f()\nf()",
    "import random; random.seed(3); print(random.random())",
    "import sqlite3; print(sqlite3.connect(':memory:').execute('select 1').fetchall())",
    "import subprocess\ntry: subprocess.run(['no such program'])\nexcept OSError: print('refused')",
]


@pytest.mark.parametrize("place", range(len(PROGRAMS)))
def test_output_and_exit_code_are_those_of_the_interpreter(place: int) -> None:
    code = PROGRAMS[place]
    real = subprocess.run([sys.executable, "-I", "-X", "utf8", "-c", code], input=STDIN, capture_output=True)
    found = run(code)
    assert (found.output, found.exit_code) == (real.stdout, real.returncode)
    last = real.stderr.decode(errors="replace").rstrip().rpartition("\n")[2]
    if real.returncode != FLUSH_FAILED:
        assert found.error.rstrip().rpartition("\n")[2] == last


def test_a_traceback_shows_the_program_alone() -> None:
    found = run("def f():\n    1 / 0\nf()")
    assert found.error == (
        'Traceback (most recent call last):\n  File "solution.py", line 3, in <module>\n'
        '  File "solution.py", line 2, in f\nZeroDivisionError: division by zero\n'
    )


def test_the_end_of_what_is_complained_is_kept() -> None:
    found = run("import sys\nfor n in range(10_000): print(n, file=sys.stderr)")
    assert found.error.endswith("9998\n9999\n")
    assert len(found.error) == 4096


def test_a_program_sees_no_environment_and_no_arguments() -> None:
    assert run("import os, sys; print(dict(os.environ), sys.argv, sys.path[:0])").output == b"{} ['solution.py'] []\n"


def test_each_run_starts_afresh() -> None:
    assert run("import json, builtins; json.dumps = None; builtins.len = None; x = 1; print(1)").output == b"1\n"
    found = run("import json; print(json.dumps([len('ab')]), 'x' in globals())")
    assert found.output == b"[2] False\n"
    numbers = {run("import random; print(random.random())").output for _ in range(3)}
    assert len(numbers) == 1


@pytest.mark.parametrize(
    "deed", ["while True: pass", "import time; time.sleep(60)", "import os; os.close(1); os.close(2)\nwhile True: pass"]
)
def test_what_takes_too_long_is_ended(deed: str) -> None:
    began = time.monotonic()
    found = run(f"print('begun', flush=True)\n{deed}", limits=Limits(seconds=0.5))
    assert 0.5 <= time.monotonic() - began < 5
    assert (found.output, found.exit_code, found.has_timed_out) == (b"begun\n", None, True)


def test_threads_that_do_not_end_keep_the_program() -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=[60]).start()\nprint(1)"
    assert run(code, limits=Limits(seconds=0.5)).has_timed_out


def test_output_is_bounded_while_it_is_read() -> None:
    limits = Limits(seconds=20, output_bytes=10_000)
    much = run("while True: print('x' * 1000)", limits=limits)
    assert (much.has_printed_too_much, much.has_timed_out, much.exit_code) == (True, False, None)
    assert len(much.output) <= 2 * 10_000 + 2**16
    assert much.seconds < 10
    assert run("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", limits=limits).has_printed_too_much
    assert not run("print('x' * 10_000, end=' ' * 10_000)", limits=limits).has_printed_too_much
    assert run("print('x' * 10_000, end=' ' * 10_000 + 'y')", limits=limits).has_printed_too_much
    assert run("print(' ' * 30_000)", limits=limits).has_printed_too_much


def test_memory_is_bounded() -> None:
    limits = Limits(seconds=20, memory_mib=64)
    assert run("x = bytearray(50 * 2**20); print(1)", limits=limits).exit_code == 0
    found = run("x = bytearray(70 * 2**20); print(1)", limits=limits)
    assert (found.exit_code, found.error.rstrip().rpartition("\n")[2]) == (1, "MemoryError")


@pytest.mark.parametrize("kind", ["AS", "CPU", "FSIZE", "CORE", "NOFILE", "STACK"])
def test_no_program_raises_its_limits(kind: str) -> None:
    code = f"""
import resource
kind = resource.RLIMIT_{kind}
soft, hard = resource.getrlimit(kind)
assert soft == hard != resource.RLIM_INFINITY, (soft, hard)
for wanted in ((hard + 1, hard + 1), (resource.RLIM_INFINITY,) * 2):
    for change in (resource.setrlimit, lambda *a: resource.prlimit(0, *a)):
        try:
            change(kind, wanted)
        except (ValueError, OSError):
            continue
        raise SystemExit("raised")
assert resource.getrlimit(kind) == (soft, hard)
"""
    assert (run(code).exit_code, run(code).error) == (0, "")


def test_the_standard_library_is_there() -> None:
    names = "argparse, ast, bz2, csv, ctypes, decimal, difflib, email.message, html.parser, inspect, json, logging"
    more = "lzma, pathlib, pickle, pprint, secrets, shlex, sqlite3, ssl, statistics, tempfile, unittest.mock, zipfile"
    assert run(f"import {names}\nimport {more}\nprint('all')").output == b"all\n"
    assert run("import zoneinfo; print(zoneinfo.ZoneInfo('Europe/Paris'))").exit_code == 0


@pytest.mark.parametrize("name", ["numpy", "pytest", "pip", "sitecustomize", "usercustomize"])
def test_what_users_install_is_not(name: str) -> None:
    found = run(f"import {name}")
    assert (found.exit_code, found.error.rstrip().rpartition("\n")[2].partition(":")[0]) == (1, "ModuleNotFoundError")
