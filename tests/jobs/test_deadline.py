"""When a stop is due, by values worked out by hand."""

import signal

import pytest

from towline.jobs import deadline as module
from towline.jobs.deadline import Deadline
from towline.storage.errors import SlurmError


class Clock:
    def __init__(self) -> None:
        self.wall, self.now = 1000.0, 50.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_stop_takes_half_again_of_what_was_measured_and_ten_seconds(clock: Clock):
    deadline = Deadline(ask_end=lambda: None)
    assert deadline.needs_s == 10.0
    deadline.note_step({"seconds/train": 20.0, "seconds/sync": 4.0, "seconds/wait": 60.0})
    deadline.note_step({"seconds/train": 10.0, "seconds/sync": 1.0})
    deadline.save_s = 36.0
    assert deadline.needs_s == 1.5 * (24 + 36) + 10


def test_the_checkpoint_begins_when_what_is_left_is_what_it_takes(clock: Clock):
    deadline = Deadline(ask_end=lambda: 1500.0, step_s=24.0, save_s=36.0)
    clock.advance(399)  # 101 s are left, 100 s are needed
    assert deadline.reason() is None
    clock.advance(1)
    assert deadline.reason() == "limit"


def test_a_limit_that_is_moved_is_seen_within_a_minute(clock: Clock):
    ends = iter([1100.0, 2000.0])
    deadline = Deadline(ask_end=lambda: next(ends))
    assert deadline.left_s() == 100.0
    clock.advance(59)
    assert deadline.left_s() == 41.0
    clock.advance(1)
    assert deadline.left_s() == 940.0


def test_without_a_limit_only_a_signal_stops_it(clock: Clock):
    deadline = Deadline(ask_end=lambda: None)
    clock.advance(1e6)
    assert deadline.reason() is None


@pytest.mark.parametrize(
    ("number", "reason"), [(signal.SIGINT, "stopped"), (signal.SIGTERM, "preempted"), (signal.SIGUSR2, "limit")]
)
@pytest.mark.parametrize("is_told", [False, True])
def test_a_signal_counts_whether_the_batch_step_or_another_process_received_it(
    clock: Clock, number: int, reason: str, is_told: bool
):
    received = {"told": {number}} if is_told else {"signals": [number]}
    deadline = Deadline(ask_end=lambda: None, **received)
    assert deadline.reason() == reason


def test_the_users_wish_to_stop_comes_before_a_preemption(clock: Clock):
    deadline = Deadline(ask_end=lambda: None, signals=[signal.SIGTERM, signal.SIGINT])
    assert deadline.reason() == "stopped"


def test_node_hours_that_run_out_stop_it_with_a_checkpoint(clock: Clock):
    deadline = Deadline(ask_end=lambda: None, budget_end=1060.0, save_s=20.0)
    clock.advance(19)
    assert deadline.reason() is None
    clock.advance(1)  # 40 s left, 1.5 * 20 + 10 needed
    assert deadline.reason() == "budget"


def test_only_a_signal_to_the_batch_step_itself_means_that_slurm_takes_the_job_away(clock: Clock):
    assert Deadline(ask_end=lambda: None, is_in_job=True, signals=[signal.SIGTERM]).is_being_ended
    assert not Deadline(ask_end=lambda: None, is_in_job=True, told={signal.SIGTERM}).is_being_ended
    assert not Deadline(ask_end=lambda: None, signals=[signal.SIGTERM]).is_being_ended


def test_while_the_controller_is_away_its_last_answer_holds(clock: Clock):
    answers = iter([2000.0])

    def ask() -> float:
        try:
            return next(answers)
        except StopIteration:
            raise SlurmError("Unable to contact slurm controller") from None

    deadline = Deadline(ask_end=ask)
    assert deadline.left_s() == 1000.0
    clock.advance(300)
    assert deadline.left_s() == 700.0


@pytest.mark.parametrize(
    ("left_s", "measured", "stops"),
    [
        # case G4-14: USR2@120 comes 120 to 180 s before the limit, and a checkpoint takes 90 s
        (120.0, False, True),
        (120.0, True, True),
        (180.0, False, True),  # nothing was measured yet: what Slurm was asked for is all there is
        (180.0, True, False),  # up to a minute too early; a checkpoint of 90 s still has time
        (144.0, True, True),  # 1.5 * 90 + 10 s are needed
        (3000.0, True, True),  # not because of the limit: somebody sent it
    ],
)
def test_the_warning_before_the_limit_waits_for_what_was_measured(
    clock: Clock, left_s: float, measured: bool, stops: bool
):
    deadline = Deadline(ask_end=lambda: 1000.0 + left_s, signals=[signal.SIGUSR2])
    if measured:
        deadline.step_s, deadline.save_s = 1.0, 89.0
    assert (deadline.reason() == "limit") is stops
