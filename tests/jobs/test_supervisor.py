"""One attempt from its start to its end, with processes that are scripts and a clock that goes on when we sleep."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from towline.jobs import supervisor
from towline.jobs.deadline import Deadline
from towline.jobs.launch import ProcessSpec
from towline.jobs.leases import Leases
from towline.jobs.supervisor import Outcome, supervise
from towline.storage.checkpoints import TrainingState, checkpoint_path, mark_complete
from towline.storage.errors import RunFault
from towline.storage.ledger import read_shard
from towline.storage.metrics import append_jsonl
from towline.storage.run_directory import RunDirectory, write_json

Script = Iterator[int | None]
"""What a process answers when it is asked whether it has ended: None, None, … then its exit code."""
CHUNK = "step-000000/wave-0/chunk-000"
LEASE = f"lease/rollouts/{CHUNK}"


class FakeProcess:
    def __init__(self, spec: ProcessSpec, script: Script, world: "World") -> None:
        self.spec, self._script, self._world = spec, script, world
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = next(self._script)
        return self._code

    def signal(self, number: int) -> None:
        self._world.signalled.append((self.spec.name, number))

    def end(self, grace_s: float) -> None:
        if self._code is None:
            self._code = -9
            self._world.ended.append(f"{self.spec.name}/{self.spec.environment['TOWLINE_LIFE']}")


class World:
    """Launcher, observer and control store of one attempt."""

    def __init__(self, run: RunDirectory, store: Any, clock: Any) -> None:
        self.run, self.store, self.clock = run, store, clock
        self.scripts: dict[str, Callable[[int], Script]] = {
            "trainer": lambda life: self.trainer(after_s=60),
            "rollout.0": lambda life: self.engine(0, life),
            "rollout.1": lambda life: self.engine(1, life),
            "scorer.0": lambda life: self.works("scorer.0", life),
        }
        self.started: list[str] = []
        self.specs: list[ProcessSpec] = []
        self.ended: list[str] = []
        """Those that the supervisor had to end."""
        self.events: list[str] = []
        self.steps: list[int] = []
        self.phases: dict[str, str] = {}
        self.stopped_after = 0.0
        self.signalled: list[tuple[str, int]] = []
        self.lost: dict[str, str] = {}
        """Processes whose node is gone → the node."""
        self.transfer_backend = "gloo"

    def store_command(self) -> None: ...

    def lost_node(self, spec: ProcessSpec) -> str | None:
        return self.lost.get(spec.name)

    def on_attempt(self, number: int) -> None:
        pass

    def start(self, spec: ProcessSpec) -> FakeProcess:
        life = int(spec.environment["TOWLINE_LIFE"])
        self.started.append(f"{spec.name}/{life}")
        self.specs.append(spec)
        return FakeProcess(spec, self.scripts[spec.name](life), self)

    def on_phases(self, phases: dict[str, str]) -> None:
        self.phases = phases

    def on_step(self, row: dict[str, Any]) -> None:
        self.steps.append(row["step"])

    def on_evaluation(self, row: dict[str, Any]) -> None:
        pass

    def on_event(self, text: str) -> None:
        self.events.append(text)

    def beat(self, name: str, life: int, phase: str = "work", *, works: bool = True) -> None:
        last = self.store.get(f"heartbeat/{name}") or {"beats": 0, "rounds": 0, "life": life}
        beat = {"life": life, "beats": last["beats"] + works, "rounds": last["rounds"] + 1, "phase": phase,
                "phases": {}, "phase_s": 0.0, "pid": 1, "host": "elsewhere"}  # fmt: skip
        self.store.set(f"heartbeat/{name}", beat)

    def trainer(self, after_s: float, status: str = "done") -> Script:
        """Trains for some seconds, and says that it is finished."""
        end = self.clock.now + after_s
        while self.clock.now < end:
            self.beat("trainer.0", 0, "train")
            yield None
        self.store.set("finished", {"status": status, "step": 3})
        yield 0

    def engine(
        self, number: int, life: int, *, serves: bool = True, until: Callable[[], bool] = lambda: False
    ) -> Script:
        if serves:
            self.store.set(f"engine/{number}", {"life": life, "probe": []})
        return self.works(f"rollout.{number}", life, until=until)

    def works(self, name: str, life: int, *, until: Callable[[], bool] = lambda: False, code: int = 1) -> Script:
        """Until the run is finished, or dies with `code` before that."""
        while self.store.get("finished") is None:
            if until():
                yield code
            self.beat(name, life)
            yield None
        yield 0

    def stands(self, name: str, life: int, phase: str, *, is_silent: bool = False) -> Script:
        """Sends heartbeats, but for those of a stopped process, and gets nowhere."""
        self.beat(name, life, phase)
        while self.store.get("finished") is None:
            if not is_silent:
                self.beat(name, life, phase, works=False)
            yield None
        yield 0

    def after(self, seconds: float) -> Callable[[], bool]:
        end = self.clock.now + seconds
        return lambda: self.clock.now >= end


@pytest.fixture
def world(run: RunDirectory, store, clock, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(supervisor, "StoreHandle", lambda key, number, log, start: store)
    return World(run, store, clock)


@pytest.fixture
def attempt(world: World, make_experiment) -> Callable[..., Outcome]:
    """Carry out an attempt; arguments are fields of [run], and the number of engines."""

    def carry_out(*, engines: int = 1, deadline: Deadline | None = None, **fields: Any) -> Outcome:
        experiment = make_experiment(local={"engines": engines}, run=fields)
        write_json(world.run.config, experiment.model_dump(mode="json"))
        return supervise(world.run, experiment, world, launcher=world, deadline=deadline)

    return carry_out


def failure(attempt: Callable[..., Outcome], **fields: Any) -> str:
    with pytest.raises(RunFault) as fault:
        attempt(**fields)
    return str(fault.value)


def record_fault(run: RunDirectory, life: int, error: str, message: str) -> None:
    """As the engine leaves it before it ends."""
    fault = {"process": "rollout.0", "life": life, "when": 1.0, "error": error, "message": message}
    write_json(run.faults(0) / f"rollout.0.{life}.json", fault | {"traceback": "", "log": "x"})


def test_a_run_without_trouble_starts_everything_once_and_says_nothing(world: World, attempt):
    assert attempt(engines=2) == Outcome(status="done", next_step=3)
    assert world.started == ["trainer/0", "rollout.0/0", "rollout.1/0", "scorer.0/0"]
    assert (world.ended, world.events) == ([], [])
    assert world.phases == {"trainer.0": "train", "rollout.0": "work", "rollout.1": "work", "scorer.0": "work"}
    state = world.run.read_state()
    assert (state["status"], state["next_step"], state["attempt"]) == ("done", 3, 0)


def test_an_engine_that_ends_is_started_again_alone(world: World, attempt):
    lives = {0: world.after(5)}
    world.scripts["rollout.0"] = lambda life: world.engine(0, life, until=lives.get(life, lambda: False))
    assert attempt(engines=2).status == "done"
    assert world.started == ["trainer/0", "rollout.0/0", "rollout.1/0", "scorer.0/0", "rollout.0/1"]
    assert world.events == ["rollout.0: ended with code 1; it starts again in 1 s (1 of 3)"]
    assert world.store.get("gone/rollout.0") == 0
    assert world.ended == []
    assert "rollout.0: ended" in world.run.log(0, "supervisor").read_text()


def test_a_scorer_that_ends_is_started_again_too(world: World, attempt):
    dies = world.after(5)
    world.scripts["scorer.0"] = lambda life: world.works("scorer.0", life, until=dies if life == 0 else lambda: False)
    assert attempt().status == "done"
    assert world.started[-1] == "scorer.0/1"


def test_an_engine_that_ends_without_an_error_while_there_is_work_is_started_again(world: World, attempt):
    dies = world.after(5)
    world.scripts["rollout.0"] = lambda life: (
        world.works("rollout.0", 0, until=dies, code=0) if life == 0 else world.engine(0, life)
    )
    world.store.set("engine/0", {"life": 0, "probe": []})
    assert attempt().status == "done"
    assert world.events == ["rollout.0: ended with code 0 before the run was finished; it starts again in 1 s (1 of 3)"]


def test_its_own_account_of_the_error_is_told(world: World, attempt):
    def dies(life: int) -> Script:
        record_fault(world.run, life, "MemoryError", f"full {life}")
        return world.engine(0, life, until=world.after(2) if life < 2 else lambda: False)

    world.scripts["rollout.0"] = dies
    assert attempt().status == "done"
    assert [event.partition(";")[0] for event in world.events] == [
        "rollout.0: MemoryError: full 0",
        "rollout.0: MemoryError: full 1",
    ]


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_an_engine_that_always_ends_ends_the_run_by_name_after_its_restarts(world: World, attempt, max_restarts: int):
    world.scripts["rollout.0"] = lambda life: world.engine(0, life, until=world.after(2))
    message = failure(attempt, max_restarts=max_restarts)
    assert message.startswith("small FAILED: rollout.0: ended with code 1")
    assert f"  next    towline resume {world.run.root}" in message
    assert [one for one in world.started if one.startswith("rollout.0")] == [
        f"rollout.0/{life}" for life in range(max_restarts + 1)
    ]
    assert sorted(world.ended) == ["scorer.0/0", "trainer/0"]
    assert world.run.read_state()["status"] == "failed"


def test_a_fault_that_could_not_be_written_is_shown_all_the_same(world: World, attempt):
    def fails(life: int) -> Script:
        fault = {"process": "trainer.1", "life": 0, "when": 1.0, "error": "CheckpointError", "message": "disk is full"}
        world.store.set("fault/trainer.0", fault | {"traceback": "", "log": "x"})
        yield from [None, 1]

    world.scripts["trainer"] = fails
    assert "FAILED: trainer.1: CheckpointError: disk is full" in failure(attempt)


def test_a_scorer_that_fails_in_its_start_is_not_started_again(world: World, attempt):
    """The user's reward file cannot be loaded: it could not be the next time."""

    def fails(life: int) -> Script:
        world.beat("scorer.0", life, "start")
        yield from [None, None, 1]

    world.scripts["scorer.0"] = fails
    assert "FAILED: scorer.0: ended with code 1" in failure(attempt)
    assert world.started.count("scorer.0/0") == 1
    assert "scorer.0/1" not in world.started


def test_an_engine_that_never_served_is_not_started_again(world: World, attempt):
    world.scripts["rollout.0"] = lambda life: world.engine(0, life, serves=False, until=world.after(2))
    assert "FAILED: rollout.0" in failure(attempt)
    assert world.started.count("rollout.0/1") == 0


def test_the_end_of_the_trainer_is_that_of_the_run(world: World, attempt):
    world.scripts["trainer"] = lambda life: world.works("trainer.0", life, until=world.after(5))
    message = failure(attempt)
    assert message.startswith("small FAILED: trainer: ended with code 1")
    assert "kept    no checkpoint" in message
    assert world.ended == ["scorer.0/0", "rollout.0/0"]
    assert len(world.started) == 3


def test_a_trainer_that_ends_too_early_without_an_error_is_a_fault(world: World, attempt):
    world.scripts["trainer"] = lambda life: world.works("trainer.0", life, until=world.after(5), code=0)
    assert "trainer: ended with code 0 before the run was finished" in failure(attempt)


def test_a_store_that_ends_ends_the_run(world: World, attempt):
    def break_store(life: int) -> Script:
        yield from (None for _ in range(20))
        world.store.code = 1
        yield from world.engine(0, life)

    world.scripts["rollout.0"] = break_store
    assert "small FAILED: store: ended with code 1" in failure(attempt)


def test_a_fault_of_an_earlier_life_is_not_blamed_for_the_end(world: World, attempt):
    dies = world.after(5)

    def engine(life: int) -> Script:
        if life == 0:
            record_fault(world.run, 0, "MemoryError", "early")
        return world.engine(0, life, until=dies if life == 0 else lambda: False)

    world.scripts["rollout.0"] = engine
    world.scripts["trainer"] = lambda life: world.works("trainer.0", life, until=world.after(30))
    message = failure(attempt)
    assert message.startswith("small FAILED: trainer: ended with code 1")
    assert "rollout.0" not in message


def test_leases_of_a_dead_engine_are_free_for_others(world: World, attempt):
    def engine(life: int) -> Script:
        if life == 0:
            assert Leases(world.store, "rollout.0", 0).take(LEASE)
        return world.engine(0, life, until=world.after(3) if life == 0 else lambda: False)

    world.scripts["rollout.0"] = engine
    attempt(engines=2)
    assert world.store.get(LEASE) == {"holder": None, "lost": 1}
    assert world.events[0].endswith(f"it starts again in 1 s (1 of 3), rollouts/{CHUNK} is free for others")


def test_a_chunk_lost_three_times_is_sealed_without_groups_and_announced(world: World, attempt):
    def engine(life: int) -> Script:
        taken = Leases(world.store, "rollout.0", life).take(LEASE)
        assert taken == (life < 3)
        return world.engine(0, life, until=world.after(2) if life < 3 else lambda: False)

    world.scripts["rollout.0"] = engine
    assert attempt().status == "done"
    shard = read_shard(world.run.rollouts / f"{CHUNK}.h5")
    assert shard.groups == ()
    assert world.store.get(f"rollouts/sealed/{CHUNK}") == shard.digest
    assert f"{LEASE} was lost three times and is given up: its groups count as lost" in world.events


def standing_later(world: World, *, load_s: float, phase: str = "generate") -> Callable[[int], Script]:
    """Loads, takes a chunk, and stands still.

    Args:
        phase: that its last heartbeat tells.
    """

    def engine(life: int) -> Script:
        if life > 0:
            yield from world.engine(0, life)
        loaded = world.after(load_s)
        while not loaded():
            world.beat("rollout.0", 0, "load", works=False)
            yield None
        world.store.set("engine/0", {"life": 0, "probe": []})
        assert Leases(world.store, "rollout.0", 0).take(LEASE)
        if phase != "load":
            world.beat("rollout.0", 0, phase)
        while world.store.get("finished") is None:
            yield None
        yield 0

    return engine


@pytest.mark.parametrize("phase", ["load", "wait for the trainer", "generate"])
@pytest.mark.parametrize("load_s", [1, 30])
def test_what_a_silent_engine_holds_is_taken_over_whenever_it_fell_silent(
    world: World, attempt, load_s: float, phase: str
):
    """Its last heartbeat may tell of a phase before the one in which it took the chunk."""
    world.scripts["rollout.0"] = standing_later(world, load_s=load_s, phase=phase)
    attempt(engines=2, lease_s=10.0)
    assert [event.partition(" for ")[0] for event in world.events] == ["rollout.0 made no progress"]
    stood_s = int(world.events[0].partition(" for ")[2].partition(" s")[0])
    assert stood_s == pytest.approx(10 + (load_s if phase == "load" else 0), abs=3), (
        "held for lease_s, not loaded for it"
    )
    assert world.events[0].endswith(f"others take over rollouts/{CHUNK}")
    assert world.store.get(LEASE) == {"holder": None, "lost": 1}
    assert world.ended == []


def test_the_only_engine_keeps_its_leases_however_long_it_takes(world: World, attempt):
    world.scripts["rollout.0"] = standing_later(world, load_s=1)
    attempt(lease_s=10.0)
    assert world.events == []
    assert world.store.get(LEASE)["holder"][:2] == ["rollout.0", 0]


def test_an_engine_that_stands_beyond_the_limit_is_ended_and_started_again(world: World, attempt):
    world.scripts["rollout.0"] = standing_later(world, load_s=1)
    assert attempt(engines=2, stall_s=20.0).status == "done"
    assert world.ended == ["rollout.0/0"]
    assert world.started[-1] == "rollout.0/1"
    assert world.events[0].startswith("rollout.0 does not answer at all")
    assert "rollout.0 does not answer at all" in (world.run.logs(0) / "stall.log").read_text()
    assert f"rollouts/{CHUNK}" in world.events[1]


def test_a_trainer_that_stands_still_ends_the_run(world: World, attempt):
    world.scripts["trainer"] = lambda life: world.stands("trainer.0", life, "train")
    message = failure(attempt, stall_s=20.0)
    assert "small FAILED: trainer.0: made no progress: no progress for 20 s in phase 'train' (limit 20 s)" in message
    assert str(world.run.logs(0) / "stall.log") in message


def test_an_engine_that_is_refused_is_started_again(world: World, attempt):
    def trainer() -> Script:
        for _ in range(20):
            yield None
        world.store.set("restart/rollout.0", {"life": 0, "why": "engine 0 received other bytes"})
        yield from world.trainer(after_s=30)

    world.scripts["trainer"] = lambda life: trainer()
    assert attempt().status == "done"
    assert world.ended == ["rollout.0/0"]
    assert world.started[-1] == "rollout.0/1"
    assert world.events[0] == "engine 0 received other bytes"
    assert len(world.events) == 2, "the next life is not refused for what the last one did"


def test_an_interrupt_asks_the_trainer_to_stop_and_the_run_can_go_on_later(world: World, attempt):
    def trainer() -> Script:
        yield None
        os.kill(os.getpid(), signal.SIGINT)
        while world.store.get("stop") is None:
            yield None
        assert world.run.read_state()["status"] == "stopping"
        yield from world.trainer(after_s=5, status="stopped")

    world.scripts["trainer"] = lambda life: trainer()
    before = signal.getsignal(signal.SIGINT)
    assert attempt() == Outcome(status="stopped", next_step=3, why="stopped")
    assert world.store.get("stop") == {"why": "stopped"}
    assert world.run.read_state()["status"] == "stopped"
    assert signal.getsignal(signal.SIGINT) == before


def test_three_interrupts_end_the_run_at_once(world: World, attempt):
    def trainer() -> Script:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            yield None
        while True:
            yield None

    world.scripts["trainer"] = lambda life: trainer()
    assert "interrupted three times" in failure(attempt)
    assert "trainer/0" in world.ended


def test_a_second_attempt_goes_on_from_the_checkpoint_and_shows_only_its_own_steps(world: World, attempt):
    state = TrainingState(step=2, wave=0, branch=0, version=2, stream_digest="", seed=0, data="", reference="",
                          kl_beta=0.04, ranks=1, zero_stage=2, precision="float32", optimizer={})  # fmt: skip
    checkpoint_path(world.run.checkpoints, 2).mkdir(parents=True)
    mark_complete(world.run.checkpoints, 2, state, {})
    for step in range(3):
        append_jsonl(world.run.metrics, {"step": step})
    world.run.logs(0).mkdir(parents=True)

    def trainer() -> Script:
        append_jsonl(world.run.metrics, {"step": 2})
        yield from world.trainer(after_s=5)

    world.scripts["trainer"] = lambda life: trainer()
    attempt()
    assert world.events == ["going on from checkpoint 2; steps trained again after it: 1"]
    assert {spec.environment["TOWLINE_RESUME_STEP"] for spec in world.specs} == {"2"}
    assert world.steps == [2]
    assert world.run.read_state()["attempt"] == 1


def test_a_wall_clock_that_jumps_by_an_hour_changes_nothing(world: World, attempt):
    def trainer() -> Script:
        world.clock.wall += 3600.0
        yield from world.trainer(after_s=20)

    world.scripts["trainer"] = lambda life: trainer()
    assert attempt(engines=2, lease_s=5.0, stall_s=10.0).status == "done"
    assert (world.events, world.ended) == ([], [])


def test_a_signal_that_only_a_process_received_stops_the_run_too(world: World, attempt):
    """Slurm sends a preemption's SIGTERM to the steps of a job, and not to its batch script."""

    def trainer() -> Script:
        while world.store.get("stop") is None:
            world.beat("trainer.0", 0, "train")
            beat = world.store.get("heartbeat/trainer.0")
            world.store.set("heartbeat/trainer.0", {**beat, "signal": int(signal.SIGTERM)})
            yield None
        yield from world.trainer(after_s=1, status="stopped")

    world.scripts["trainer"] = lambda life: trainer()
    assert attempt() == Outcome(status="stopped", next_step=3, why="preempted")


def test_the_time_that_steps_and_saves_took_decides_when_a_limit_stops_the_run(world: World, attempt):
    """50 s of a step and 30 s of a save: 1.5 times that and 10 s more are 130 s before the end."""
    began = world.clock.now
    limit = world.clock.wall + 300

    def trainer() -> Script:
        append_jsonl(world.run.metrics, {"step": 0, "seconds/train": 40.0, "seconds/sync": 10.0})
        world.store.set("saved", {"step": 1, "seconds": 30.0})
        while world.store.get("stop") is None:
            world.beat("trainer.0", 0, "train")
            yield None
        world.stopped_after = world.clock.now - began
        yield from world.trainer(after_s=1, status="stopped")

    world.scripts["trainer"] = lambda life: trainer()
    assert attempt(deadline=Deadline(ask_end=lambda: limit)) == Outcome(status="stopped", next_step=3, why="limit")
    assert world.stopped_after == pytest.approx(300 - 130, abs=2)
    assert any(event.startswith("stopping (limit): 130 s to the time limit") for event in world.events)


def test_an_engine_whose_node_is_lost_is_done_without(world: World, attempt):
    """srun answers 0 for a step whose node is gone."""
    dies = world.after(20)
    world.scripts["rollout.1"] = lambda life: world.engine(1, life, until=dies)
    world.lost = {"rollout.1": "g7"}
    assert attempt(engines=2).status == "done"
    assert world.started.count("rollout.1/0") == 1
    assert "rollout.1/1" not in world.started
    assert world.events == ["rollout.1: node g7 is lost; the run goes on with 1 of 2 engines"]
    assert world.store.get("gone/rollout.1") == 0


def test_when_the_last_engines_node_is_lost_the_run_ends(world: World, attempt):
    dies = world.after(20)
    world.scripts["rollout.0"] = lambda life: world.engine(0, life, until=dies)
    world.lost = {"rollout.0": "g7"}
    assert "rollout.0: node g7 is lost" in failure(attempt)


def test_a_process_that_does_not_end_after_the_trainer_is_ended(world: World, attempt):
    """Its node was started again: nobody is there to end, and srun waits for ever."""

    def stays() -> Script:
        while True:
            yield None

    world.scripts["scorer.0"] = lambda life: stays()
    assert attempt().status == "done"
    assert world.ended == ["scorer.0/0"]
    assert world.events == ["not ended by itself, and ended now: scorer.0"]


def test_what_a_loading_engine_takes_first_is_not_taken_from_it_at_once(world: World, attempt):
    """It showed no progress for longer than a lease while it loaded."""

    def engine() -> Script:
        world.beat("rollout.0", 0, "load")
        until = world.clock.now + 30
        while world.clock.now < until:
            world.beat("rollout.0", 0, "load", works=False)
            yield None
        Leases(world.store, "rollout.0", 0).take(LEASE)
        # Until its next heartbeat nobody sees that it has moved.
        until = world.clock.now + 1.5
        while world.clock.now < until:
            yield None
        yield from world.engine(0, 0)

    world.scripts["rollout.0"] = lambda life: engine()
    assert attempt(engines=2, lease_s=10.0).status == "done"
    assert world.events == []
