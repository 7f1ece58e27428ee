"""Who is blamed when nothing moves: by our own clock, and by who still sends heartbeats."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from towline.jobs.standstill import START_LIMIT_S, Watch

STALL_S = 60.0


class Processes:
    """Heartbeats of several processes as the supervisor finds them, second after second."""

    def __init__(self, watch: Watch, clock) -> None:
        self._watch, self._clock = watch, clock
        self.beats: dict[str, dict[str, Any]] = {}

    def begin(self, name: str, phase: str, life: int = 0) -> None:
        self.beats[name] = {"life": life, "beats": 0, "rounds": 0, "phase": phase}

    def live(self, seconds: int, *, working: tuple[str, ...] = (), silent: tuple[str, ...] = ()) -> None:
        for _ in range(seconds):
            for name, beat in self.beats.items():
                beat["beats"] += name in working
                beat["rounds"] += name not in silent
            self._watch.look({name: dict(beat) for name, beat in self.beats.items()})
            self._clock.sleep(1.0)


@pytest.fixture
def watch(clock) -> Watch:
    return Watch(STALL_S)


@pytest.fixture
def processes(watch: Watch, clock) -> Processes:
    return Processes(watch, clock)


def test_who_works_is_not_blamed(watch: Watch, processes: Processes):
    processes.begin("trainer.0", "train")
    processes.live(500, working=("trainer.0",))
    assert watch.culprit() is None
    assert watch.stood_s("trainer.0") == 1.0


def test_who_stands_beyond_the_limit_is_named_with_phase_and_time(watch: Watch, processes: Processes):
    processes.begin("trainer.0", "train")
    processes.begin("rollout.0", "generate")
    processes.live(60, working=("rollout.0",))
    assert watch.culprit() is None
    processes.live(1, working=("rollout.0",))
    culprit = watch.culprit()
    assert culprit is not None
    assert (culprit.process, culprit.phase, culprit.stood_s, culprit.is_silent) == ("trainer.0", "train", 61.0, False)
    assert str(culprit) == "made no progress: no progress for 61 s in phase 'train' (limit 60 s)"


def test_of_two_that_stand_the_one_that_stands_longest_is_blamed(watch: Watch, processes: Processes):
    processes.begin("trainer.0", "train")
    processes.begin("trainer.1", "train")
    processes.live(10, working=("trainer.0",))
    processes.live(65)
    culprit = watch.culprit()
    assert culprit is not None
    assert culprit.process == "trainer.1"


def test_a_silent_process_is_blamed_although_its_peers_stand_longer(watch: Watch, processes: Processes):
    processes.begin("trainer.0", "train")
    processes.begin("trainer.1", "train")
    processes.live(20, working=("trainer.1",))
    processes.live(45, silent=("trainer.1",))
    culprit = watch.culprit()
    assert culprit is not None
    assert (culprit.process, culprit.is_silent, culprit.stood_s) == ("trainer.1", True, 46.0)
    assert "does not answer at all" in str(culprit)


def test_one_that_was_silent_for_a_moment_is_not_blamed_for_who_hangs(watch: Watch, processes: Processes):
    processes.begin("trainer.0", "train")
    processes.begin("rollout.0", "generate")
    processes.live(56, working=("rollout.0",))
    processes.live(6, silent=("rollout.0",))
    culprit = watch.culprit()
    assert culprit is not None
    assert (culprit.process, culprit.is_silent) == ("trainer.0", False)


@pytest.mark.parametrize("phase", ["start", "join", "load"])
def test_a_process_may_take_longer_to_start(watch: Watch, processes: Processes, phase: str):
    processes.begin("rollout.0", phase)
    processes.live(int(START_LIMIT_S))
    assert watch.culprit() is None
    processes.live(1)
    culprit = watch.culprit()
    assert culprit is not None
    assert culprit.limit_s == START_LIMIT_S


def test_a_limit_longer_than_that_of_the_start_holds_for_the_start_too(clock):
    watch = Watch(2 * START_LIMIT_S)
    processes = Processes(watch, clock)
    processes.begin("rollout.0", "load")
    processes.live(int(2 * START_LIMIT_S))
    assert watch.culprit() is None
    processes.live(1)
    assert watch.culprit() is not None


def test_a_new_life_begins_anew(watch: Watch, processes: Processes):
    processes.begin("rollout.0", "generate")
    processes.live(61)
    assert watch.culprit() is not None
    # As many beats and rounds as the last that was seen of the old one.
    processes.beats["rollout.0"] |= {"life": 1, "rounds": 60}
    processes.live(1)
    assert watch.stood_s("rollout.0") == 1.0
    assert watch.culprit() is None


def test_who_is_forgotten_is_not_blamed_and_begins_anew(watch: Watch, processes: Processes):
    processes.begin("rollout.0", "generate")
    processes.live(61)
    watch.forget("rollout.0")
    assert watch.culprit() is None
    assert watch.stood_s("rollout.0") == 0.0
    processes.live(60)
    assert watch.culprit() is None


def test_a_wall_clock_that_jumps_blames_nobody(monkeypatch: pytest.MonkeyPatch):
    jumped = jumping_clock(monkeypatch)
    watch = Watch(STALL_S)
    for _ in range(3):
        watch.look({"trainer.0": {"life": 0, "beats": 0, "rounds": 0, "phase": "train"}})
        jumped(3600.0)
    assert watch.culprit() is None
    assert watch.stood_s("trainer.0") < STALL_S


def jumping_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Real time, but for a wall clock that an administrator sets."""
    offsets: list[float] = []
    real = time.time
    monkeypatch.setattr("time.time", lambda: real() + sum(offsets))
    return offsets.append
