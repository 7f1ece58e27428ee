"""What is killed from outside, by a node out of memory, says nothing about the program."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from scoring_pools import wait_until
from towline.rollout.rewards.code_tests import run_stdio, run_tests
from towline.rollout.rewards.verdict import Verdict
from towline.rollout.sandbox.limits import Limits
from towline.rollout.sandbox.sandbox import Sandbox, SandboxEnded, open_sandbox, sandbox
from towline.storage.errors import RewardError

PATIENT = Limits(seconds=60.0)
TESTS = ["assert f(2) == 4"]
ENDLESS = "def f(x):\n    while True: pass"


@pytest.fixture
def box() -> Iterator[Sandbox]:
    box = open_sandbox()
    yield box
    box.close()


def busy_child(zygote: int) -> int | None:
    """The process below it that has used the most processor time, once it has used any."""
    used = {int(pid): processor_ticks(int(pid)) for pid in children_of(zygote)}
    busiest = max(used, key=lambda pid: used[pid], default=None)
    return busiest if busiest is not None and used[busiest] > 10 else None


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def processor_ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def while_it_runs(box: Sandbox, end: object) -> list[BaseException]:
    """Run an endless program, do `end` to the sandbox meanwhile, and give what came of it."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            box.run_tests(ENDLESS, TESTS, "", [], PATIENT, True)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert wait_until(lambda: busy_child(box._process.pid) is not None, 20.0)
    end(box)
    thread.join(20.0)
    assert not thread.is_alive()
    return raised


def test_a_zygote_that_is_killed_gives_no_verdict(box: Sandbox) -> None:
    (error,) = while_it_runs(box, lambda box: os.kill(box._process.pid, signal.SIGKILL))
    assert isinstance(error, SandboxEnded)


def test_tests_that_are_killed_give_no_verdict(box: Sandbox) -> None:
    tests = ["while True: pass"]
    raised: list[BaseException] = []

    def run() -> None:
        try:
            box.run_tests("", tests, "", [], PATIENT, True)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert wait_until(lambda: busy_child(box._process.pid) is not None, 20.0)
    judge = busy_child(box._process.pid)
    assert judge is not None
    os.kill(judge, signal.SIGKILL)
    thread.join(20.0)
    assert [type(error) for error in raised] == [SandboxEnded]


def test_a_program_that_is_killed_has_not_passed(box: Sandbox) -> None:
    def kill_program(box: Sandbox) -> None:
        program = busy_child(box._process.pid)
        assert program is not None
        os.kill(program, signal.SIGKILL)

    assert while_it_runs(box, kill_program) == []


def test_the_next_verdict_comes_from_a_new_zygote() -> None:
    run_tests("def f(x): return 2 * x", TESTS)
    first = sandbox()._process.pid
    os.kill(first, signal.SIGKILL)
    assert run_tests("def f(x): return 2 * x", TESTS) == Verdict(value=1.0)
    assert sandbox()._process.pid != first
    os.kill(sandbox()._process.pid, signal.SIGKILL)
    assert run_stdio("print(int(input()) * 2)", [("21", "42")]) == Verdict(value=1.0)


def test_tests_that_cannot_begin_give_no_verdict(box: Sandbox) -> None:
    impossible = Limits(seconds=60.0)
    object.__setattr__(impossible, "memory_mib", 0.5)  # no limit can be half a thing: putting it up fails
    with pytest.raises(RewardError, match="the sandbox cannot begin with tests"):
        box.run_tests("def f(x): return 2 * x", TESTS, "", [], impossible, True)
