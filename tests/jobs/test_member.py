"""A process through its lives: when it starts, what it is told, and that nothing is left of it at the end."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from towline.jobs.launch import ProcessSpec
from towline.jobs.member import Member


@dataclass
class FakeProcess:
    spec: ProcessSpec
    code: int | None = None
    graces: list[float] = field(default_factory=list[float])

    def poll(self) -> int | None:
        return self.code

    def end(self, grace_s: float) -> None:
        self.graces.append(grace_s)


class FakeLauncher:
    def __init__(self) -> None:
        self.started: list[FakeProcess] = []

    def start(self, spec: ProcessSpec) -> FakeProcess:
        self.started.append(FakeProcess(spec))
        return self.started[-1]


@pytest.fixture
def launcher() -> FakeLauncher:
    return FakeLauncher()


def member(launcher: FakeLauncher, name: str = "rollout.0") -> Member:
    return Member(ProcessSpec(name=name, module="m", environment={"OMP_NUM_THREADS": "1"}, log=Path("x")), launcher)


def test_a_process_is_started_once_and_told_its_life(clock, launcher: FakeLauncher):
    engine = member(launcher)
    assert not engine.is_running
    assert engine.poll() is None
    for _ in range(3):
        engine.start_if_due()
    (process,) = launcher.started
    assert process.spec.environment == {"OMP_NUM_THREADS": "1", "TOWLINE_LIFE": "0"}
    process.code = 7
    assert (engine.poll(), engine.is_running) == (7, True)


def test_it_waits_1_then_4_then_16_seconds_before_it_is_started_again(clock, launcher: FakeLauncher):
    engine = member(launcher)
    engine.start_if_due()
    for life, pause in enumerate((1.0, 4.0, 16.0), start=1):
        launcher.started[-1].code = 1
        assert engine.begin_next_life() == pause
        assert (engine.life, engine.is_running, engine.poll()) == (life, False, None)
        clock.sleep(pause - 0.01)
        engine.start_if_due()
        assert len(launcher.started) == life
        clock.sleep(0.02)
        engine.start_if_due()
        assert len(launcher.started) == life + 1
        assert launcher.started[-1].spec.environment["TOWLINE_LIFE"] == str(life)


def test_a_wall_clock_that_jumps_starts_nothing_early_and_nothing_late(clock, launcher: FakeLauncher):
    engine = member(launcher)
    engine.start_if_due()
    engine.begin_next_life()
    clock.wall += 3600.0
    engine.start_if_due()
    assert len(launcher.started) == 1
    clock.wall -= 7200.0
    clock.sleep(1.01)
    engine.start_if_due()
    assert len(launcher.started) == 2


def test_a_process_is_asked_to_end_but_what_is_left_of_a_dead_one_is_killed_at_once(clock, launcher: FakeLauncher):
    engine = member(launcher)
    engine.end(5.0)  # never started
    engine.start_if_due()
    engine.end(5.0)
    launcher.started[0].code = -9
    engine.end(5.0)
    assert launcher.started[0].graces == [5.0, 0.0]


def test_only_the_trainer_cannot_be_started_again(launcher: FakeLauncher):
    assert member(launcher, "rollout.1").can_restart
    assert member(launcher, "scorer.0").can_restart
    assert not member(launcher, "trainer").can_restart
