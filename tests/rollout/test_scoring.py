import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from towline.rollout.rewards.config import RewardConfig
from towline.rollout.scoring import ScoringPool
from towline.storage.errors import ConfigError
from towline.storage.records import ScoreStatus

# One file with every misdeed, chosen by the completion, so that one warm pool serves many tests.
HOSTILE = r"""
import ctypes, os, signal, subprocess, sys, threading, time
from pathlib import Path

HERE = Path(__file__).parent
print("printed while loading")

def grade(completion, gold):
    deed, _, argument = completion.partition(" ")
    return globals()[deed](argument)

def value(argument):
    return float(argument)

def pid(argument):
    return os.getpid()

def sleep(argument):
    time.sleep(float(argument))
    return 1

def loop(argument):
    while True:
        pass

def hold_the_interpreter(argument):
    return len(str(pow(7, 10**9)))

def swallow(argument):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

def leave(argument):
    with (HERE / "tries").open("a") as file:
        file.write("x")
    os._exit(int(argument))

def leave_once(argument):
    if not (HERE / f"left{argument}").exists():
        (HERE / f"left{argument}").touch()
        os._exit(0)
    return 1

def segfault(argument):
    ctypes.string_at(0)

def print_much(argument):
    print("x" * 100_000)
    os.write(1, b"\0\0\0\2{}" * 100)
    subprocess.run(["echo", "from a program"], check=True)
    return 1

def read_input(argument):
    return len(sys.stdin.read()) + len(os.read(0, 100))

def fork_and_leave(argument):
    child = os.fork()
    if child == 0:
        time.sleep(600)
    (HERE / "child").write_text(str(child))
    os._exit(0)

def fork_and_loop(argument):
    child = subprocess.Popen(["sleep", "600"])
    (HERE / "child").write_text(str(child.pid))
    while True:
        pass

def fork_and_come_back(argument):
    os.fork()
    return 1

def leave_soon(argument):
    threading.Timer(0.1, os._exit, [0]).start()
    return 1

def hold_soon(argument):
    threading.Timer(0.05, pow, [7, 10**9]).start()
    return 1

def environment(argument):
    return len([name for name in os.environ if name.startswith(("SLURM", "SECRET", "OMPI"))])

def modules(argument):
    return len({"torch", "vllm", "pydantic", "transformers"} & set(sys.modules))
"""
NUM_WORKERS, LIMIT_S = 2, 0.5


def _rewards(*uses: str) -> list[RewardConfig]:
    return [RewardConfig(use=use, weight=1.0) for use in uses]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "hostile.py").write_text(HOSTILE)
    return folder


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[ScoringPool]:
    with ScoringPool(_rewards("hostile.py:grade"), NUM_WORKERS, LIMIT_S, folder) as pool:
        yield pool


def _children() -> set[int]:
    """Processes below this one, at any depth, zombies too."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    below = {os.getpid()}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return below - {os.getpid()}


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_until(condition: Callable[[], bool], limit_s: float = 3.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def _open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_scores_come_in_the_order_of_the_items(pool: ScoringPool) -> None:
    items = [("sleep 0.2", "")] + [(f"value {number}", "") for number in range(40)]
    assert [score.total for score in pool.score_many(items)] == [1.0, *range(40)]


@pytest.mark.parametrize("deed", ["loop", "hold_the_interpreter", "swallow"])
def test_a_hang_is_a_time_out_and_spoils_nothing_else(pool: ScoringPool, deed: str) -> None:
    started = time.monotonic()
    before, hung, after = pool.score_many([("value 1", ""), (deed, ""), ("value 2", "")])
    assert time.monotonic() - started < 4 * LIMIT_S
    assert (before.total, after.total) == (1.0, 2.0)
    assert hung.status == ScoreStatus.TIMEOUT
    assert math.isnan(hung.total)
    assert math.isnan(hung.parts["hostile.grade"])
    assert LIMIT_S <= hung.seconds < 3 * LIMIT_S
    assert pool.slowest is not None
    assert pool.slowest.status == ScoreStatus.TIMEOUT


def test_a_worker_that_ends_is_tried_once_more_then_failed(pool: ScoringPool, folder: Path) -> None:
    died, fine = pool.score_many([("leave 3", ""), ("value 5", "")])
    assert (died.status, fine.total) == (ScoreStatus.FAILED, 5.0)
    assert math.isnan(died.total)
    assert "exit code 3" in died.detail
    assert (folder / "tries").read_text() == "xx"


def test_a_second_try_that_succeeds_counts(pool: ScoringPool) -> None:
    (result,) = pool.score_many([("leave_once", "")])
    assert (result.total, result.status) == (1.0, ScoreStatus.OK)


def test_a_segfault_is_a_failure(pool: ScoringPool) -> None:
    (result,) = pool.score_many([("segfault", "")])
    assert result.status == ScoreStatus.FAILED
    assert "SIGSEGV" in result.detail


def test_an_exception_keeps_the_worker(pool: ScoringPool) -> None:
    pool.score_many([("value 1", "before the exception")])
    workers = _children()
    (result,) = pool.score_many([("no_such_deed", "")])
    assert (result.status, _children()) == (ScoreStatus.FAILED, workers)
    assert "KeyError: 'no_such_deed' at " in result.detail


@pytest.mark.parametrize(("deed", "value"), [("print_much", 1.0), ("read_input", 0.0)])
def test_standard_streams_belong_to_the_reward(pool: ScoringPool, deed: str, value: float) -> None:
    results = pool.score_many([(deed, ""), ("value 3", ""), ("value 4", "")])
    assert [result.total for result in results] == [value, 3.0, 4.0]


@pytest.mark.parametrize(
    ("deed", "status"), [("fork_and_leave", ScoreStatus.FAILED), ("fork_and_loop", ScoreStatus.TIMEOUT)]
)
def test_a_child_that_holds_the_pipes_is_killed_with_the_worker(
    pool: ScoringPool, folder: Path, deed: str, status: ScoreStatus
) -> None:
    (result,) = pool.score_many([(deed, "")])
    assert result.status == status
    child = int((folder / "child").read_text())
    assert _wait_until(lambda: not _is_running(child))


def test_a_forked_child_has_no_say(pool: ScoringPool) -> None:
    results = pool.score_many([("fork_and_come_back", str(number)) for number in range(6)] + [("value 9", "")])
    assert [result.total for result in results] == [1.0] * 6 + [9.0]


def test_a_worker_that_ends_between_two_calls_costs_no_try(folder: Path) -> None:
    with ScoringPool(_rewards("hostile.py:grade"), 1, 5.0, folder) as pool:
        pool.score_many([("leave_soon", "")])
        time.sleep(0.3)
        (result,) = pool.score_many([("leave_once again", "")])
    assert result.status == ScoreStatus.OK


def test_a_worker_that_takes_nothing_in_is_a_time_out(folder: Path) -> None:
    with ScoringPool(_rewards("hostile.py:grade"), 1, LIMIT_S, folder) as pool:
        pool.score_many([("hold_soon", "")])
        time.sleep(0.2)
        stuck, fine = pool.score_many([("value " + " " * 1_000_000 + "6", ""), ("value 7", "")])
    assert (stuck.status, fine.total) == (ScoreStatus.TIMEOUT, 7.0)


def test_time_in_the_queue_is_not_time_at_work(pool: ScoringPool) -> None:
    num_items = 20
    results = pool.score_many([("sleep 0.08", str(number)) for number in range(num_items)])
    assert num_items * 0.08 / NUM_WORKERS > LIMIT_S
    assert [result.status for result in results] == [ScoreStatus.OK] * num_items


def test_a_completion_larger_than_a_pipe_gets_through(pool: ScoringPool) -> None:
    (result,) = pool.score_many([("value " + " " * 1_000_000 + "6", "\ud800 \0 é")])
    assert result.total == 6.0


def test_equal_items_are_scored_once(pool: ScoringPool) -> None:
    (first,) = pool.score_many([("sleep 0.1", "again")])
    num_scored = _num_scored(pool)
    (second,) = pool.score_many([("sleep 0.1", "again")])
    assert (second, _num_scored(pool)) == (first, num_scored)
    pool.score_many([("sleep 0.1", "another gold answer")])
    assert _num_scored(pool) == num_scored + 1


def test_failures_are_not_remembered(pool: ScoringPool) -> None:
    pool.score_many([("no_such_deed", "twice")])
    num_scored = _num_scored(pool)
    pool.score_many([("no_such_deed", "twice")])
    assert _num_scored(pool) == num_scored + 1


def _num_scored(pool: ScoringPool) -> int:
    latency = pool.latency()
    return 0 if latency is None else latency.num_scored


def test_progress_is_reported_while_nothing_finishes(pool: ScoringPool) -> None:
    calls: list[tuple[float, int, int]] = []
    started = time.monotonic()
    items = [("sleep 0.38", f"slow {number}") for number in range(6)]
    pool.score_many(items, lambda done, total: calls.append((time.monotonic(), done, total)))
    times = [started, *(moment for moment, _, _ in calls)]
    assert max(later - sooner for sooner, later in pairwise(times)) < 1.0
    assert calls[-1][1:] == (6, 6)
    assert len(calls) > 2


def test_a_call_that_is_interrupted_leaves_no_stale_answer(pool: ScoringPool) -> None:
    def stop(num_done: int, num_items: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.score_many([("sleep 0.35", f"stop {number}") for number in range(8)], stop)
    results = pool.score_many([(f"value {number}", "after the stop") for number in range(8)])
    assert [result.total for result in results] == list(range(8))


def test_workers_see_no_secrets_and_no_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SECRET_TOKEN", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "1")
    with ScoringPool(_rewards("hostile.py:grade"), 1, 5.0, folder) as pool:
        assert [result.total for result in pool.score_many([("environment", ""), ("modules", "")])] == [0.0, 0.0]


def test_nothing_is_left_behind(folder: Path) -> None:
    children, files = _children(), _open_files()
    with suppress(RuntimeError), ScoringPool(_rewards("hostile.py:grade"), 2, 0.3, folder) as pool:
        pool.score_many([("loop", ""), ("fork_and_leave", ""), ("value 1", "")])
        pool.score_many([("sleep 0.28", f"{number}") for number in range(9)], _raise)
        pytest.fail("what on_progress raises must come out")
    assert _wait_until(lambda: _children() <= children)
    assert _open_files() == files
    assert not _is_running(int((folder / "child").read_text()))
    pool.close()


def _raise(num_done: int, num_items: int) -> None:
    raise RuntimeError


@pytest.mark.parametrize("deed", ["sleep 0", "loop"], ids=["free", "busy"])
def test_workers_end_with_a_parent_that_was_killed(folder: Path, deed: str) -> None:
    program = (
        "import sys, time; from pathlib import Path; from towline.rollout import scoring\n"
        "from towline.rollout.rewards.config import RewardConfig\n"
        "scoring.ORPHAN_GRACE_S = 0.0\n"
        "pool = scoring.ScoringPool([RewardConfig(use='hostile.py:grade', weight=1.0)], 1, 1.5, Path(sys.argv[1]))\n"
        "(score,) = pool.score_many([('pid', '')]); print(int(score.total), flush=True)\n"
        "pool.score_many([(sys.argv[2], '')]); time.sleep(60)\n"
    )
    read_fd, write_fd = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, write_fd, 1)]
    parent = os.posix_spawn(
        sys.executable, [sys.executable, "-c", program, str(folder), deed], dict(os.environ), file_actions=actions
    )
    os.close(write_fd)
    with os.fdopen(read_fd) as output:
        worker = int(output.readline())
    assert _is_running(worker)
    time.sleep(0.1)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert _wait_until(lambda: not _is_running(worker))


def test_built_in_rewards_agree_with_themselves_outside_the_pool(folder: Path) -> None:
    with ScoringPool(_rewards("math_answer", "format"), 1, 5.0, folder) as pool:
        assert pool.latency() is None
        right, undecided = pool.score_many([("\\boxed{14,250}", "#### 14250"), ("\\boxed{7}", "see the figure above")])
        assert (right.parts, right.total) == ({"math_answer": 1.0, "format": 1.0}, 2.0)
        assert undecided.status == ScoreStatus.FAILED
        assert (math.isnan(undecided.parts["math_answer"]), undecided.parts["format"]) == (True, 1.0)
        assert len(pool.code_hash) == 32


def test_latency_is_of_the_completions_and_the_slowest_is_kept(folder: Path) -> None:
    with ScoringPool(_rewards("hostile.py:grade"), 1, 5.0, folder) as pool:
        pool.score_many([("value 1", f"{number}") for number in range(98)] + [("sleep 0.2", ""), ("sleep 0.1", "")])
        latency, slowest = pool.latency(), pool.slowest
    assert latency is not None
    assert slowest is not None
    assert (latency.num_scored, latency.max_s, slowest.completion) == (100, slowest.seconds, "sleep 0.2")
    assert latency.p50_s < 0.1 <= latency.p99_s < 0.2 <= latency.max_s


@pytest.mark.parametrize(
    ("uses", "num_workers", "limit_s", "message"),
    [
        (["math_anser"], 1, 1.0, "did you mean 'math_answer'"),
        (["absent.py:grade"], 1, 1.0, "no Python file"),
        (["leaves.py:grade"], 1, 1.0, r"leaves\.py:grade: the worker ended \(exit code 5\) while a worker loaded"),
        (["format", "format"], 1, 1.0, "different names"),
        ([], 1, 1.0, "one or more parts"),
        (["format"], 0, 1.0, "num_workers >= 1"),
        (["format"], 1, 0.0, "limit_s > 0"),
    ],
)
def test_a_pool_that_cannot_work_says_so_at_once(
    folder: Path, uses: list[str], num_workers: int, limit_s: float, message: str
) -> None:
    (folder / "leaves.py").write_text("import os\nos._exit(5)\n")
    children, files = _children(), _open_files()
    with pytest.raises(ConfigError, match=message):
        ScoringPool(_rewards(*uses), num_workers, limit_s, folder)
    assert (_children() - children, _open_files()) == (set(), files)
