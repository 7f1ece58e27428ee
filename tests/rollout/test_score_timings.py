import math

from towline.rollout.score_timings import NUM_SLOWEST, ScoreTimings, latency
from towline.storage.records import Score, ScoreStatus


def _score(status: ScoreStatus = ScoreStatus.OK, **part_seconds: float) -> Score:
    return Score(
        parts=dict.fromkeys(part_seconds, 1.0),
        part_status=dict.fromkeys(part_seconds, status),
        part_seconds=part_seconds,
        total=1.0,
        status=status,
        seconds=sum(part_seconds.values()),
    )


def test_percentiles_are_times_that_were_measured() -> None:
    hundred = latency([number / 100 for number in range(1, 101)])
    assert (hundred.num_scored, hundred.p50_s, hundred.p99_s, hundred.max_s) == (100, 0.5, 0.99, 1.0)
    one = latency([0.25])
    assert (one.p50_s, one.p99_s, one.max_s) == (0.25, 0.25, 0.25)
    assert str(latency([0.0004, 2.0])) == "p50 0.4 ms, p99 2.0 s, max 2.0 s (2 scored)"


def test_each_reward_has_its_own_times_and_unknown_ones_count_nowhere() -> None:
    timings = ScoreTimings()
    assert (timings.latencies(), timings.slowest, timings.lines()) == ({}, [], [])
    timings.add(_score(fast=0.25, slow=1.0), "row 0", "")
    timings.add(_score(fast=0.5, slow=math.nan), "row 1", "")
    latencies = timings.latencies()
    assert {part: (one.num_scored, one.max_s) for part, one in latencies.items()} == {
        "fast": (2, 0.5),
        "slow": (1, 1.0),
    }


def test_the_slowest_are_named_with_reward_place_and_beginning() -> None:
    timings = ScoreTimings()
    for number in range(20):
        timings.add(_score(grade=1.0 + number), f"row {number}", f"{number}{'x' * 200}")
    timings.add(_score(ScoreStatus.TIMEOUT, grade=30.0), "row 20", "for ever\n")
    assert [slow.seconds for slow in timings.slowest] == [30.0, 20.0, 19.0, 18.0, 17.0]
    assert len(timings.slowest) == NUM_SLOWEST
    assert len(timings.slowest[1].completion) == 100
    assert timings.lines()[0] == "grade: p50 11.0 s, p99 30.0 s, max 30.0 s (21 scored)"
    assert timings.lines()[1] == "slowest grade: 30.0 s, timeout, row 20: 'for ever\\n'"
