"""Reported faults of code graders, by the number of their case, and more of the same kinds.

`G2-xx` are things that programs did, or that machines did to graders: each must have the right verdict here, within its
time, and leave nothing behind.
"""

import json
import logging
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from code_cases import (
    BREEDERS,
    CONNECTIONS,
    DEEP,
    EARLY_ENDS,
    FALSE_VALUES,
    FORGERIES,
    HANGS,
    HOGS,
    MEMORY_SPY,
    NO_PROGRAMS,
    PATCH_TESTS,
    PATCHES,
    REFUSED_AT_ONCE,
    RIGHT,
    SPY,
)
from scoring_pools import children, open_files, wait_until
from towline.rollout.rewards.code_tests import OUTPUT_LIMIT, grade, run_stdio, run_tests
from towline.rollout.rewards.verdict import Verdict
from towline.rollout.sandbox.limits import Limits
from towline.rollout.sandbox.sandbox import sandbox
from towline.rollout.sandbox.zygote import NUM_SPARES

TESTS = ["assert twice(3) == 6", "assert twice(50) == 100"]
SHORT = Limits(seconds=0.5)
SLACK_S = 5.0
"""What may be added to a limit: for the end of the program, on a busy machine."""


def verdict(code: str, limits: Limits | None = None) -> Verdict:
    return run_tests(code, TESTS, limits)


def assert_the_next_is_right() -> None:
    assert verdict(RIGHT) == Verdict(value=1.0)


@contextmanager
def nothing_left() -> Iterator[None]:
    """The same sandbox, the same other processes, and no descriptor that was not there before."""
    zygote = sandbox()._process.pid
    assert wait_until(lambda: len(children(zygote)) == NUM_SPARES)
    files, others = open_files(), children() - children(zygote)
    yield
    assert wait_until(lambda: len(children(zygote)) == NUM_SPARES), children(zygote)
    assert children() - children(zygote) == others
    assert set(open_files()) <= set(files)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


@contextmanager
def growing_less_than(mib: int) -> Iterator[None]:
    """This process, at any time in between."""

    def held_mib(which: str) -> float:
        return int(Path("/proc/self/status").read_text().partition(which)[2].split()[0]) / 1024

    Path("/proc/self/clear_refs").write_text("5")  # the highest value is counted from now on
    before = held_mib("VmRSS:")
    yield
    assert held_mib("VmHWM:") - before < mib


@pytest.fixture
def fresh_sandbox() -> None:
    """The one of this process starts again, in the surroundings of the test."""
    sandbox().close()


@pytest.mark.parametrize("case", EARLY_ENDS)
def test_ending_early_pays_nothing(case: str) -> None:
    with nothing_left():
        assert verdict(EARLY_ENDS[case], Limits(seconds=2.0)).value == 0.0
        assert_the_next_is_right()


def test_how_a_program_ended_is_in_the_detail() -> None:
    assert "exit code 0" in verdict(EARLY_ENDS["G2-01 at the first call"]).detail
    assert "test 2 of 2" in verdict(EARLY_ENDS["G2-01 at the second call"]).detail
    assert "SIGKILL" in verdict(EARLY_ENDS["G2-02 killed by itself"]).detail


@pytest.mark.parametrize("case", FALSE_VALUES)
def test_values_that_claim_to_be_right_are_not(case: str) -> None:
    assert verdict(FALSE_VALUES[case]).value == 0.0
    for test in ("assert twice(3) in [6]", "assert {6: 1}[twice(3)]", "assert not twice(3) != 6"):
        assert run_tests(FALSE_VALUES[case], [test]).value == 0.0
    for test in ("assert abs(twice(3) - 6) < 1e-6", "assert [twice(3)] == [6]"):
        assert run_tests(FALSE_VALUES[case], [test]).value == 0.0


def test_values_that_are_right_pass_though_their_class_is_a_subclass() -> None:
    code = "import enum\nclass Size(enum.IntEnum): SIX, MANY = 6, 100\ndef twice(number): return Size(2 * number)"
    assert verdict(code).value == 1.0


@pytest.mark.parametrize("case", PATCHES)
def test_a_program_changes_nothing_that_tests_use(case: str) -> None:
    for test in PATCH_TESTS:
        assert run_tests(PATCHES[case], [test]).value == 0.0
    assert verdict(PATCHES[case]).value == 0.0
    assert run_tests(RIGHT, PATCH_TESTS).value == 1.0


@pytest.mark.parametrize("option", ["-O", "-OO"])
def test_asserts_count_when_the_run_is_optimised(option: str) -> None:
    """G2-05"""
    code = f"""
from towline.rollout.rewards.code_tests import run_tests
from towline.rollout.sandbox.judge import read_suite
wrong, right = "def twice(number): return 0", {RIGHT!r}
print([run_tests(code, {TESTS!r}).value for code in (wrong, right)])
assert False
try:
    exec(read_suite("", ["assert False"], []).tests[0])
except AssertionError:
    print("they count")
"""
    done = subprocess.run([sys.executable, option, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[0.0, 1.0]\nthey count\n", "")


@pytest.mark.parametrize("case", NO_PROGRAMS)
def test_a_program_that_does_not_load_passes_no_test(case: str) -> None:
    found = run_tests(NO_PROGRAMS[case], TESTS, partial_credit=True)
    assert found.value == 0.0
    assert "0 of 2 passed" in found.detail
    assert_the_next_is_right()


@pytest.mark.usefixtures("fresh_sandbox")
def test_files_beside_the_program_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G2-07"""
    mark = tmp_path / "loaded"
    harm = f"import os\nopen({str(mark)!r}, 'w').close()\nos._exit(0)\n"
    for name in ("sitecustomize.py", "usercustomize.py", "conftest.py", "json.py", "solution.py", "towline.py"):
        (tmp_path / name).write_text(harm)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --co\n")
    (tmp_path / "pyvenv.cfg").write_text("home = /nonesuch\n")
    (tmp_path / "evil.pth").write_text(f"import os; open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    for name in ("PYTHONPATH", "PYTHONUSERBASE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "sitecustomize.py"))
    assert verdict("import json\ndef twice(number): return 0").value == 0.0
    assert verdict(f"import json\n{RIGHT}").value == 1.0
    for name in ("conftest", "pytest"):  # nor what is installed beside Towline
        assert verdict(f"import {name}\n{RIGHT}").value == 0.0
    assert not mark.exists()


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_result_is_none(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with nothing_left():
        assert verdict(FORGERIES[case], Limits(seconds=2.0)).value == 0.0
    assert list(tmp_path.iterdir()) == []
    assert not (tmp_path.parent / "result.json").exists()
    assert_the_next_is_right()


@pytest.mark.parametrize("spy", [SPY, MEMORY_SPY], ids=["G2-09 what Python shows", "G2-09 memory of processes"])
def test_tests_are_out_of_reach(spy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests.py").write_text("\n".join(TESTS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TESTS", json.dumps(TESTS))
    found = run_tests(spy, TESTS, Limits(seconds=10.0))
    assert (found.value, "AssertionError" in found.detail) == (0.0, True), found


@pytest.mark.parametrize("case", HANGS)
def test_a_hang_ends_at_its_limit(case: str) -> None:
    with nothing_left():
        with within(SHORT.seconds + SLACK_S):
            found = verdict(HANGS[case], SHORT)
        assert (found.value, "not done within 0.5 s" in found.detail) == (0.0, True), found
        assert_the_next_is_right()


@pytest.mark.parametrize("case", BREEDERS)
def test_processes_are_neither_started_nor_left(case: str) -> None:
    with nothing_left():
        with within(SHORT.seconds + SLACK_S):
            assert verdict(BREEDERS[case], SHORT).value == 0.0
        assert_the_next_is_right()


def test_a_refused_process_is_no_reason_to_fail() -> None:
    """G2-14: with a program that goes on without."""
    code = f"import subprocess\ntry: subprocess.Popen(['sleep', '120'])\nexcept OSError: pass\n{RIGHT}"
    with nothing_left(), within(8.0):
        assert verdict(code, Limits(seconds=3.0)).value == 1.0


@pytest.mark.parametrize("case", HOGS)
def test_memory_is_bounded(case: str) -> None:
    limits = Limits(seconds=2.0, memory_mib=256)
    with nothing_left(), growing_less_than(200):
        with within(limits.seconds + SLACK_S):
            found = verdict(HOGS[case], limits)
        assert found.value == 0.0, found
        # Of the others it depends on what the interpreter itself takes, where the bound is met.
        assert "MemoryError" in found.detail or case not in REFUSED_AT_ONCE, found
        assert_the_next_is_right()


@pytest.mark.usefixtures("fresh_sandbox")
def test_a_large_process_grades_as_a_small_one() -> None:
    """G2-16: address space and threads of the caller are no part of the program's."""
    enough = threading.Event()
    threads = [threading.Thread(target=enough.wait) for _ in range(200)]
    with mmap.mmap(-1, 40 * 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0):
        for thread in threads:
            thread.start()
        try:
            assert verdict(f"import json\n{RIGHT}") == Verdict(value=1.0)
            assert run_stdio("import json\nprint(2 * int(input()))", [("3\n", "6\n")]) == Verdict(value=1.0)
        finally:
            enough.set()
            for thread in threads:
                thread.join()


def test_lower_hard_limits_are_kept_to() -> None:
    """G2-17"""
    code = f"""
from towline.rollout.rewards.code_tests import run_tests
from towline.rollout.sandbox.limits import Limits
for limits in (Limits(), Limits(memory_mib=16 * 1024)):
    print(run_tests({RIGHT!r}, {TESTS!r}, limits).value, run_tests("def twice(n): return n", {TESTS!r}, limits).value)
"""
    shell = 'ulimit -s 8192 && ulimit -v 2000000 && ulimit -Hs && ulimit -Hv && exec "$0" -c "$1"'
    environment = os.environ | {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    done = subprocess.run(
        ["bash", "-c", shell, sys.executable, code], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.stdout.split(), done.stderr) == (["8192", "2000000", *["1.0", "0.0"] * 2], "")


@pytest.mark.parametrize(
    "code",
    [
        "while True: print('y')",
        "import os\nwhile True: os.write(1, b'x' * 65536)",
        "import sys\nwhile True: print('y', file=sys.stderr)",
        "import sys\nwhile True: sys.stdout.write(chr(10))",
        "print('x' * 10**9)",
        "import threading\ndef talk():\n    while True: print('y')\n"
        "for _ in range(4): threading.Thread(target=talk).start()",
    ],
)
def test_endless_output_is_cut_off(code: str) -> None:
    """G2-18"""
    with nothing_left(), growing_less_than(100):
        with within(4.0 + SLACK_S):
            found = run_stdio(code, [("", "y\n")], Limits(memory_mib=256, output_bytes=2**16))
        assert found.value == 0.0
        assert found.detail.startswith(OUTPUT_LIMIT) or "MemoryError" in found.detail, found
        assert_the_next_is_right()


def test_what_functions_print_is_nobodys() -> None:
    """G2-18: tests of functions look at values only."""
    code = "import os, sys\ndef twice(number):\n    for _ in range(100): print('y' * 100_000)\n    return 2 * number"
    assert verdict(code) == Verdict(value=1.0)
    assert verdict("def twice(number):\n    while True: print('y' * 100_000)", SHORT).value == 0.0


@pytest.mark.slow
def test_output_that_is_cut_is_not_compared() -> None:
    """G2-19"""
    expected = "1\n" * 3_000_000
    longer = run_stdio("print('1\\n' * 3_000_000, end='')\nprint('WRONG')", [("", expected)])
    assert (longer.value, longer.detail.startswith(OUTPUT_LIMIT)) == (0.0, True)
    assert run_stdio("print('1\\n' * 3_000_000, end='')", [("", expected)]) == Verdict(value=1.0)
    shorter = run_stdio("print('1\\n' * 2_999_999, end='')", [("", expected)])
    assert (shorter.value, OUTPUT_LIMIT in shorter.detail) == (0.0, False)
    blanks = run_stdio("print('1\\n' * 3_000_000, end='')\nprint(' ' * 100)", [("", expected)])
    assert blanks == Verdict(value=1.0)


@pytest.mark.parametrize("case", CONNECTIONS)
def test_nobody_is_called(case: str, tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as letters,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        port = listener.getsockname()[1]
        letters.bind(("127.0.0.1", port))
        local.bind(path)
        abstract.bind("\0" + path)
        for one in (local, abstract):
            one.listen()
        call = CONNECTIONS[case].format(port=port, path=path)
        deed = f"import socket, subprocess\n{call}"
        assert verdict(f"{deed}\n{RIGHT}").value == 0.0
        without = f"import socket, subprocess\ntry:\n    {call}\nexcept (OSError, subprocess.SubprocessError): pass\n"
        assert verdict(without + RIGHT).value == 1.0
        for one in (listener, letters, local, abstract):
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1) if one is letters else one.accept()


@pytest.mark.parametrize(
    "code", ["first = input()\n", "import sys\nif not sys.stdin.read(): raise EOFError\n", "print('y')\ninput('?')\n"]
)
def test_there_is_no_standard_input_for_functions(code: str) -> None:
    """G2-21"""
    with within(3.0):
        found = verdict(code + RIGHT)
    assert (found.value, "EOFError" in found.detail) == (0.0, True), found


@pytest.mark.parametrize(
    "code",
    [
        "import sys\nx, y = map(int, sys.stdin.buffer.read().split())\nsys.stdout.buffer.write(b'%d\\n' % (x * y))",
        "import os\nx, y = map(int, os.read(0, 100).split())\nos.write(1, str(x * y).encode())",
        "import sys\nx, y = map(int, sys.stdin.readline().split())\nprint(x * y)",
        "x, y = map(int, open(0).read().split())\nprint(x * y, flush=True)",
        "import io, sys\ninput = io.TextIOWrapper(sys.stdin.buffer).readline\nx, y = map(int, input().split())\n"
        "out = io.StringIO()\nout.write(str(x * y))\nsys.stdout.write(out.getvalue())",
        "import sys\nsys.setrecursionlimit(10**6)\nimport threading\nthreading.stack_size(2**27)\n"
        "def main():\n    x, y = map(int, input().split())\n    print(x * y)\n"
        "threading.Thread(target=main).start()",
    ],
)
def test_fast_ways_to_read_and_print_are_there(code: str) -> None:
    """G2-22"""
    assert run_stdio(code, [("12 34\n", "408\n"), ("5 0\n", "0\n")]) == Verdict(value=1.0)


@pytest.mark.parametrize(
    ("printed", "expected", "value"),
    [
        ("0.3333333", "0.333333", 1.0),
        ("0.333333", "0.3333333333333333", 1.0),
        ("0.33", "0.333333", 0.0),
        ("1e-3", "0.001", 1.0),
        ("2", "2.0", 1.0),
        ("2.0", "2", 0.0),
        ("1000000.4", "1000000.0", 1.0),
        ("1000002.0", "1000000.0", 0.0),
        ("0.0000001", "0.0", 1.0),
        ("nan", "0.5", 0.0),
        ("inf", "1e308", 0.0),
    ],
)
def test_floats_are_compared_with_a_tolerance(printed: str, expected: str, value: float) -> None:
    """G2-23"""
    assert run_stdio(f"print({printed!r})", [("", f"{expected}\n")]).value == value


@pytest.mark.parametrize(
    ("printed", "value"),
    [("x y \t\n1 2\n\n\n", 1.0), ("x y\r\n1 2", 1.0), ("xy\n1 2\n", 0.0), ("x y 1 2\n", 0.0), ("X y\n1 2\n", 0.0)],
)
def test_blanks_at_ends_are_free_and_separators_are_not(printed: str, value: float) -> None:
    """G2-24; the lines of the fourth count."""
    assert run_stdio(f"print({printed!r}, end='')", [("", "x y\n1 2\n")]).value == value


def test_whole_numbers_of_thousands_of_digits_are_numbers() -> None:
    """G2-25"""
    digits = "1" + "0" * 4998 + "7"
    assert run_tests("def power(): return 10**4999 + 7", [f"assert power() == {digits}"]) == Verdict(value=1.0)
    assert run_tests("def power(): return 10**4999 + 7", ["assert power() == 10**4999 + 7"]) == Verdict(value=1.0)
    assert run_tests("def power(): return 10**4999 + 8", [f"assert power() == {digits}"]).value == 0.0
    assert run_tests("def text(): return str(10**4999 + 7)", [f"assert text() == {digits!r}"]) == Verdict(value=1.0)
    assert run_tests("def last(text): return int(text) % 10", [f"assert last({digits!r}) == 7"]) == Verdict(value=1.0)
    assert run_tests("def same(number): return number", [f"assert same({digits}) == {digits}"]) == Verdict(value=1.0)
    assert run_stdio("print(int(input()) + 1)", [("9" * 5000, "1" + "0" * 5000)]) == Verdict(value=1.0)


@pytest.mark.parametrize(
    "code",
    [
        "def twice(number):\n    print('\\udcff')\n    raise ValueError('\\udcfe')",
        "def twice(number): return '\udcff'",
        "def twice(number): return '\\udcff'",
        "def twice(number): return {'\\ud800': ['\\udfff']}",
        "class Half(Exception):\n    def __str__(self): return '\\udcfe'\ndef twice(number): raise Half",
        "raise ValueError('\\ud800')",
        "import sys\nsys.exit('\\ud800')",
        "def twice(number): raise type('\\ud800', (ValueError,), {})",
    ],
)
def test_half_a_surrogate_pair_is_a_wrong_answer(code: str) -> None:
    """G2-26"""
    for found in (
        verdict(code),
        run_stdio(code + "\nprint('\\udcff')", [("", "x\n")]),
        grade(f"```python\n{code}\n```", json.dumps(TESTS)),
    ):
        assert found.value == 0.0
        json.dumps(asdict(found), ensure_ascii=False).encode()
    assert_the_next_is_right()


def test_half_a_surrogate_pair_can_be_the_right_answer() -> None:
    """G2-26"""
    assert run_tests("def half(): return '\\ud800'", ["assert half() == '\\ud800'"]).value == 1.0


def test_nothing_is_deleted_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """G2-27"""
    home, precious, out, scratch = (tmp_path / name for name in ("home", "precious", "out", "scratch"))
    for folder in (home, precious, scratch):
        folder.mkdir()
        (folder / "kept").write_text("kept")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("CANARY_DIR", str(precious))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    sandbox().close()
    before = sorted(tmp_path.rglob("*"))
    deeds = [
        f"for folder in (os.path.expanduser('~'), os.environ.get('CANARY_DIR', '/nonesuch'), {str(tmp_path)!r}):\n"
        "    shutil.rmtree(folder, ignore_errors=True)",
        f"open({str(out)!r}, 'w').write('x')",
        f"os.unlink({str(precious / 'kept')!r})",
        f"os.truncate({str(precious / 'kept')!r}, 0)",
        f"os.rename({str(precious)!r}, {str(out)!r})",
        f"os.symlink('/', {str(out)!r})",
        f"os.link({str(precious / 'kept')!r}, {str(out)!r})",
        f"os.mkdir({str(out)!r})",
        f"os.mkfifo({str(out)!r})",
        f"os.chmod({str(precious)!r}, 0)",
        f"os.utime({str(precious / 'kept')!r}, (0, 0))",
        "tempfile.mkdtemp()",
        "tempfile.NamedTemporaryFile(delete=False)",
        f"os.chdir({str(precious)!r}); open('made', 'w')",
        "os.unlink = os.rmdir = shutil.rmtree = None",
        f"open('/dev/shm/canary-{os.getpid()}', 'w')",
    ]
    stamp = (precious / "kept").stat()
    for deed in deeds:
        code = f"import os, shutil, tempfile\ntry:\n    exec({deed!r})\nexcept OSError: pass\n{RIGHT}"
        assert verdict(code).value in (0.0, 1.0)
        assert verdict(f"import os, shutil, tempfile\nexec({deed!r})\n{RIGHT}").value in (0.0, 1.0)
    assert sorted(tmp_path.rglob("*")) == before
    assert (precious / "kept").read_text() == "kept"
    assert (precious / "kept").stat().st_mtime_ns == stamp.st_mtime_ns
    assert precious.stat().st_mode & 0o777 != 0
    assert not Path(f"/dev/shm/canary-{os.getpid()}").exists()
    assert os.unlink is not None


@pytest.mark.parametrize("case", DEEP)
def test_deep_recursion_and_crashes_are_plain_failures(case: str) -> None:
    with nothing_left():
        with within(1.0 + SLACK_S):
            assert verdict(DEEP[case], Limits(seconds=1.0)).value == 0.0
        assert_the_next_is_right()


@pytest.mark.slow
def test_many_threads_grade_beside_threads_that_log_and_allocate(caplog: pytest.LogCaptureFixture) -> None:
    """G2-29"""
    enough = threading.Event()
    caplog.set_level(logging.INFO)

    def log() -> None:
        while not enough.wait(0.0005):
            logging.getLogger("towline.noise").info("%d", len(bytearray(100_000)))

    noise = [threading.Thread(target=log) for _ in range(4)]
    for thread in noise:
        thread.start()
    try:
        with within(300.0), nothing_left(), ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: [verdict(RIGHT).value for _ in range(25)], range(8)))
    finally:
        enough.set()
        for thread in noise:
            thread.join()
    assert found == [[1.0] * 25] * 8


@pytest.mark.slow
def test_a_hundred_hangs_leave_nothing_behind() -> None:
    """G2-30"""
    assert_the_next_is_right()
    own = sandbox()
    with nothing_left():
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: verdict(HANGS["G2-11 swallowed"], Limits(seconds=0.2)).value, range(100)))
        assert found == [0.0] * 100
        assert_the_next_is_right()
    assert sandbox() is own
