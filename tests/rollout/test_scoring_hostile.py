"""Reward functions that hang, end their process, leave others behind: each is a status, and nothing of it stays."""

import math
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from scoring_pools import LIMIT_S, children, is_running, open_files, rewards, wait_until
from towline.rollout import scoring
from towline.rollout.scoring import ScoringPool
from towline.storage.errors import RewardError
from towline.storage.records import ScoreStatus


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
    assert hung.detail == f"hostile.grade: no answer within {LIMIT_S} s"
    assert hung.part_seconds == {"hostile.grade": hung.seconds}
    assert ScoreStatus.TIMEOUT in {slow.status for slow in pool.timings.slowest}


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
    pool.score_many([("sleep 0.05", f"{number}") for number in range(2)])
    workers = children()
    (result,) = pool.score_many([("no_such_deed", "")])
    assert (result.status, children()) == (ScoreStatus.FAILED, workers)
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
    assert wait_until(lambda: not is_running(child))


def test_a_forked_child_has_no_say(pool: ScoringPool) -> None:
    results = pool.score_many([("fork_and_come_back", str(number)) for number in range(6)] + [("value 9", "")])
    assert [result.total for result in results] == [1.0] * 6 + [9.0]


def test_a_worker_that_takes_nothing_in_is_a_time_out(folder: Path) -> None:
    with ScoringPool(rewards("hostile.py:grade"), 1, LIMIT_S, folder) as pool:
        pool.score_many([("hold_soon", "")])
        time.sleep(0.2)
        stuck, fine = pool.score_many([("value " + " " * 1_000_000 + "6", ""), ("value 7", "")])
    assert (stuck.status, fine.total) == (ScoreStatus.TIMEOUT, 7.0)


def test_workers_see_no_secrets_and_no_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SECRET_TOKEN", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "1")
    with ScoringPool(rewards("hostile.py:grade"), 1, 5.0, folder) as pool:
        assert [result.total for result in pool.score_many([("environment", ""), ("modules", "")])] == [0.0, 0.0]


def test_nothing_is_left_behind(folder: Path) -> None:
    before, files = children(), open_files()
    with suppress(RuntimeError), ScoringPool(rewards("hostile.py:grade"), 2, 0.3, folder) as pool:
        pool.score_many([("loop", ""), ("fork_and_leave", ""), ("value 1", "")])
        pool.score_many([("sleep 0.28", f"{number}") for number in range(9)], _raise)
        pytest.fail("what on_progress raises must come out")
    assert wait_until(lambda: children() <= before)
    assert open_files() == files
    assert not is_running(int((folder / "child").read_text()))
    pool.close()


def _raise(num_done: int, num_items: int) -> None:
    raise RuntimeError


def test_a_daemon_is_killed_with_the_worker_that_started_it(pool: ScoringPool, folder: Path) -> None:
    (folder / "daemon").unlink(missing_ok=True)
    hung, fine = pool.score_many([("daemon_and_loop", ""), ("value 3", "")])
    assert (hung.status, fine.total) == (ScoreStatus.TIMEOUT, 3.0)
    assert wait_until(lambda: not is_running(_read(folder / "daemon")))


def test_a_daemon_lives_as_long_as_its_worker(folder: Path) -> None:
    (folder / "daemon").unlink(missing_ok=True)
    with ScoringPool(rewards("hostile.py:grade"), 1, 5.0, folder) as pool:
        assert pool.score_many([("daemon", "")])[0].total == 1.0
        assert is_running(_read(folder / "daemon"))
    assert not is_running(_read(folder / "daemon"))


def test_the_end_of_one_worker_does_not_touch_what_another_started(folder: Path) -> None:
    (folder / "daemon").unlink(missing_ok=True)
    with ScoringPool(rewards("hostile.py:grade"), 2, LIMIT_S, folder) as pool:
        pool.score_many([("sleep 0.3", "keeps the first worker"), ("daemon", "")])
        hung, _ = pool.score_many([("loop", "of the first worker"), ("sleep 0.4", "of the other")])
        assert hung.status == ScoreStatus.TIMEOUT
        time.sleep(0.1)
        assert is_running(_read(folder / "daemon"))


def test_a_fork_bomb_leaves_nothing(folder: Path) -> None:
    before = children()
    with ScoringPool(rewards("hostile.py:grade"), 1, LIMIT_S, folder) as pool:
        alone = children()
        bomb, fine = pool.score_many([("multiply", ""), ("value 2", "")])
        assert (bomb.status, fine.total) == (ScoreStatus.TIMEOUT, 2.0)
        assert wait_until(lambda: len(children()) == len(alone))
    assert children() <= before


@pytest.mark.parametrize(
    ("deed", "detail"),
    [
        ("close_everything", "hostile.grade: the worker ended ("),
        ("write_everywhere", "hostile.grade: the worker sent no proper reply (SIGKILL), 2 times"),
        ("interrupt", "hostile.grade: KeyboardInterrupt: pressed by nobody"),
        ("unusual", "hostile.grade: Unusual: not an Exception"),
        ("recurse", "hostile.grade: RecursionError: maximum recursion depth exceeded"),
        ("huge_answer", "hostile.grade: returned 'xxx"),
        ("allocate 3000", "hostile.grade: MemoryError: "),
        ("kill_the_parent", "hostile.grade: the process that starts workers ended, 2 times"),
    ],
)
def test_what_a_reward_does_to_its_process_is_a_failure(pool: ScoringPool, deed: str, detail: str) -> None:
    before, failed, after = pool.score_many([("value 1", deed), (deed, ""), ("value 2", deed)])
    assert failed.status == ScoreStatus.FAILED
    assert failed.detail.startswith(detail)
    assert len(failed.detail) < 600
    assert math.isnan(failed.total)
    assert (before.total, after.total) == (1.0, 2.0)


def test_blocked_signals_hold_nothing_up(pool: ScoringPool) -> None:
    hung, fine = pool.score_many([("block_signals", ""), ("value 3", "")])
    assert (hung.status, fine.total) == (ScoreStatus.TIMEOUT, 3.0)


def test_a_thread_that_is_left_over_does_not_keep_the_worker(folder: Path) -> None:
    with ScoringPool(rewards("hostile.py:grade"), 1, 5.0, folder) as pool:
        scores = pool.score_many([("leave_a_thread", ""), ("value 2", "")])
        assert [score.total for score in scores] == [1.0, 2.0]


def test_a_worker_may_take_so_much_memory_and_no_more(folder: Path) -> None:
    with ScoringPool(rewards("hostile.py:grade"), 1, 5.0, folder, memory_gib=0.25) as pool:
        enough, too_much = pool.score_many([("allocate 100", ""), ("allocate 300", "")])
    assert (enough.total, too_much.status) == (100 * 2**20, ScoreStatus.FAILED)
    assert "MemoryError" in too_much.detail


def test_no_completion_pays_for_the_memory_that_others_left(folder: Path) -> None:
    with ScoringPool(rewards("hostile.py:grade"), 1, 5.0, folder, memory_gib=0.25) as pool:
        scores = pool.score_many([("hoard 50", f"{number}") for number in range(12)])
    # With three of them a worker holds more than half of what it may, and leaves.
    assert [score.total for score in scores] == [1.0, 2.0, 3.0] * 4


def test_a_template_that_does_not_answer_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "ANSWER_LIMIT_S", 0.3)
    before = children()
    with ScoringPool(rewards("hostile.py:grade"), 1, 5.0, folder) as pool:
        stopped, fine = pool.score_many([("stop_the_parent", ""), ("value 2", "")])
    assert (stopped.status, fine.total) == (ScoreStatus.FAILED, 2.0)
    assert wait_until(lambda: children() <= before)


def test_a_template_that_ends_again_and_again_is_an_error(folder: Path) -> None:
    others = children()

    def kill_template(num_done: int, num_items: int) -> None:
        for child in children() - others:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    with ScoringPool(rewards("hostile.py:grade"), 1, 60.0, folder) as pool, pytest.raises(RewardError) as raised:
        pool.score_many([("loop", f"{number}") for number in range(3)], kill_template)
    assert "3 times without a score in between" in str(raised.value)


def test_of_several_rewards_the_one_that_hangs_or_dies_is_named(folder: Path) -> None:
    parts = rewards("format", "hostile.py:grade", "math_answer")
    with ScoringPool(parts, 1, LIMIT_S, folder) as pool:
        hung, died = pool.score_many([("loop", "1"), ("leave 3", "1")])
    assert hung.detail == "hostile.grade: no answer within 0.5 s"
    assert died.detail == "hostile.grade: the worker ended (exit code 3), 2 times"
    assert {part for part, seconds in hung.part_seconds.items() if not math.isnan(seconds)} == {"hostile.grade"}
    assert set(hung.part_status.values()) == {ScoreStatus.TIMEOUT}


def _read(path: Path) -> int:
    return int(path.read_text())
