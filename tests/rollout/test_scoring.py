import math
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from scoring_pools import LIMIT_S, NUM_WORKERS, children, open_files, rewards
from towline.rollout.scoring import MAX_ITEM_CHARS, ScoringPool
from towline.storage.errors import ConfigError
from towline.storage.records import ScoreStatus


def test_scores_come_in_the_order_of_the_items(pool: ScoringPool) -> None:
    items = [("sleep 0.2", "")] + [(f"value {number}", "") for number in range(40)]
    assert [score.total for score in pool.score_many(items)] == [1.0, *range(40)]


def test_a_worker_that_ends_between_two_calls_costs_no_try(folder: Path) -> None:
    with ScoringPool(rewards("hostile.py:grade"), 1, 5.0, folder) as pool:
        pool.score_many([("leave_soon", "")])
        time.sleep(0.3)
        (result,) = pool.score_many([("leave_once again", "")])
    assert result.status == ScoreStatus.OK


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
    latencies = pool.timings.latencies()
    return latencies["hostile.grade"].num_scored if latencies else 0


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


def test_built_in_rewards_agree_with_themselves_outside_the_pool(folder: Path) -> None:
    with ScoringPool(rewards("math_answer", "format"), 1, 5.0, folder) as pool:
        assert pool.timings.latencies() == {}
        right, undecided = pool.score_many([("\\boxed{14,250}", "#### 14250"), ("\\boxed{7}", "see the figure above")])
        assert (right.parts, right.total) == ({"math_answer": 1.0, "format": 1.0}, 2.0)
        assert undecided.status == ScoreStatus.FAILED
        assert (math.isnan(undecided.parts["math_answer"]), undecided.parts["format"]) == (True, 1.0)
        assert len(pool.code_hash) == 32


def test_times_are_of_each_reward_and_the_slowest_samples_are_named(folder: Path) -> None:
    with ScoringPool(rewards("hostile.py:grade", "format"), 1, 5.0, folder) as pool:
        items = [("value 1", f"{number}") for number in range(98)] + [("sleep 0.2", ""), ("sleep 0.1", "")]
        pool.score_many(items, where=lambda number: f"row {number}")
        pool.score_many(items)  # from the cache: no times of now
        latencies, slowest = pool.timings.latencies(), pool.timings.slowest
    assert {part: latency.num_scored for part, latency in latencies.items()} == {"hostile.grade": 100, "format": 100}
    grade = latencies["hostile.grade"]
    assert grade.p50_s < 0.1 <= grade.p99_s < 0.2 <= grade.max_s
    assert latencies["format"].max_s < 0.1
    assert [(slow.part, slow.where, slow.completion) for slow in slowest[:2]] == [
        ("hostile.grade", "row 98", "sleep 0.2"),
        ("hostile.grade", "row 99", "sleep 0.1"),
    ]
    assert slowest[0].seconds == pytest.approx(grade.max_s)


@pytest.mark.parametrize(
    ("uses", "num_workers", "limit_s", "message"),
    [
        (["math_anser"], 1, 1.0, "did you mean 'math_answer'"),
        (["absent.py:grade"], 1, 1.0, "no Python file"),
        (["leaves.py:grade"], 1, 1.0, r"leaves\.py:grade: the process ended \(exit code 5\) while a worker loaded"),
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
    before, files = children(), open_files()
    with pytest.raises(ConfigError, match=message):
        ScoringPool(rewards(*uses), num_workers, limit_s, folder)
    assert (children() - before, open_files()) == (set(), files)


def test_items_are_taken_as_there_is_room_for_them(pool: ScoringPool) -> None:
    num_items, num_taken = 60, 0

    def items() -> Iterator[tuple[str, str]]:
        nonlocal num_taken
        for number in range(num_items):
            num_taken += 1
            yield f"value {' ' * 2**20}{number}", ""

    ahead: list[int] = []
    scores = pool.score_many(items(), lambda num_done, _: ahead.append(num_taken - num_done))
    assert [score.total for score in scores] == list(range(num_items))
    # 4 MiB wait, and each worker has one.
    assert max(ahead) <= 5 + NUM_WORKERS


def test_an_item_that_is_too_long_is_not_read_and_says_so(pool: ScoringPool) -> None:
    allowed, too_long, fine = pool.score_many(
        [("value " + " " * (MAX_ITEM_CHARS - 7) + "6", ""), ("value " + " " * MAX_ITEM_CHARS, ""), ("value 5", "")]
    )
    assert (allowed.total, fine.total) == (6.0, 5.0)
    assert (too_long.status, math.isnan(too_long.total)) == (ScoreStatus.FAILED, True)
    assert too_long.detail == "completion and gold answer have 8,388,614 characters, more than 8,388,608: not read"


def test_items_that_end_with_an_error_end_the_call(pool: ScoringPool) -> None:
    def items() -> Iterator[tuple[str, str]]:
        yield "sleep 0.2", "before the error"
        raise FileNotFoundError

    with pytest.raises(FileNotFoundError):
        pool.score_many(items())
    assert [score.total for score in pool.score_many([("value 1", "after the error")])] == [1.0]


def test_small_items_go_out_several_at_once_and_the_limit_is_each_ones_own(pool: ScoringPool) -> None:
    """Behind a hang in the same batch nothing is lost, and nothing pays for it."""
    pool.score_many([(f"value {number}", "makes batches large") for number in range(400)])
    items = [(f"value {number}", "batch") for number in range(400)]
    items[100] = items[300] = ("loop", "batch")
    scores = pool.score_many(items)
    assert [number for number, score in enumerate(scores) if score.status != ScoreStatus.OK] == [100, 300]
    assert all(scores[number].total == number for number in range(400) if number not in (100, 300))
    assert [LIMIT_S <= scores[number].seconds < 3 * LIMIT_S for number in (100, 300)] == [True, True]


def test_the_queue_is_no_part_of_the_limit(pool: ScoringPool) -> None:
    """Of the kind of G1-58: a burst that takes longer than the limit, and what waits for a worker is not timed."""
    scores = pool.score_many([(f"sleep {0.01 + number % 3 / 1000}", f"{number}") for number in range(300)])
    assert {score.status for score in scores} == {ScoreStatus.OK}


def test_a_burst_of_right_answers_is_right(folder: Path) -> None:
    """G1-58. The spaces make each of them another one for the cache."""
    with ScoringPool(rewards("math_answer"), 2, 2.0, folder) as pool:
        burst = [(f"\\boxed{{\\frac{{3}}{{7}}}}{' ' * number}", "\\frac{3}{7}") for number in range(300)]
        assert sum(score.total for score in pool.score_many(burst)) == 300


def test_the_thread_that_made_the_pool_may_end(folder: Path) -> None:
    pools: list[ScoringPool] = []
    thread = threading.Thread(target=lambda: pools.append(ScoringPool(rewards("hostile.py:grade"), 1, 5.0, folder)))
    thread.start()
    thread.join()
    with pools[0] as pool:
        (before,) = pool.score_many([("pid", "before")])
        time.sleep(0.1)
        (after,) = pool.score_many([("pid", "after")])
    assert before.total == after.total


def test_the_cache_is_of_one_version_of_the_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ScoringPool(rewards("hostile.py:grade"), 1, 5.0, folder) as pool:
        pool.score_many([("value 1", "hash")])
        first = pool.timings.latencies()["hostile.grade"].num_scored
        monkeypatch.setattr(pool, "code_hash", "another")
        pool.score_many([("value 1", "hash")])
        assert pool.timings.latencies()["hostile.grade"].num_scored == first + 1
