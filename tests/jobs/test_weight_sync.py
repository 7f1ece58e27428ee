"""A publication from the trainer's half to two engines: commit, try again, refuse; and who is left out of it.

Everything is real but the model: control store, transfer group, publisher, subscribers. The engines are scripted.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from single_rank import single_rank
from towline.jobs.control_store import ControlStore
from towline.jobs.launch import LocalLauncher
from towline.jobs.store_handle import StoreHandle
from towline.rollout.scripted_engine import ScriptedEngine, noise_script
from towline.rollout.transfer_group import TransferGroup
from towline.storage.errors import TransferError
from towline.storage.weight_stream import JoinRequest, TensorMeta

KEY = b"key"
PROBE_TOKENS = [3, 1, 4, 1, 5]
TIMEOUT_S = 20.0
ATTEMPTS = itertools.count()

# The trainer's half imports DeepSpeed, which takes seconds.
pytestmark = pytest.mark.slow


class Trainer:
    """Weights as the publisher sees them: three tensors, two of them in one bucket."""

    def __init__(self) -> None:
        self.weights = {
            "embed.weight": torch.arange(24.0).view(6, 4),
            "norm.weight": torch.ones(4),
            "big.weight": torch.full((300, 500), 0.25),
        }
        self.num_gathered = 0

    def tensors(self) -> list[TensorMeta]:
        return [
            TensorMeta(name=name, dtype="float32", shape=tuple(tensor.shape)) for name, tensor in self.weights.items()
        ]

    @contextmanager
    def gathered(self, indices: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        self.num_gathered += len(indices)
        yield [list(self.weights.values())[index] for index in indices]


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreHandle]:
    handle = StoreHandle(KEY, 0, tmp_path_factory.mktemp("store") / "store.log", LocalLauncher().store_command())
    yield handle
    handle.close()


@pytest.fixture(scope="module", autouse=True)
def trainer_group() -> Iterator[None]:
    with single_rank():
        yield


class Ended(Exception):
    """In an engine's thread: its process has ended."""


class Fleet:
    """Engines that serve in threads, and the publisher."""

    def __init__(self, handle: StoreHandle, attempt: int) -> None:
        self._handle, self._attempt = handle, attempt
        self._threads: dict[int, threading.Thread] = {}
        self._ended: dict[int, threading.Event] = {}
        self.store = self._client()
        self.store.set("probe_tokens", PROBE_TOKENS)
        self.trainer = Trainer()
        self.subscribers: dict[int, Any] = {}
        self.beats: list[str] = []
        self.settled: list[tuple[int, str]] = []
        self.branch = 0

    def start(
        self, number: int, engine: ScriptedEngine | None = None, *, life: int = 0, model: str = ""
    ) -> ScriptedEngine:
        """Returns when the engine has announced itself."""
        engine = engine or scripted()
        ended = self._ended[number] = threading.Event()
        thread = self._threads[number] = threading.Thread(target=self._serve, args=(number, engine, life, ended, model))
        thread.start()
        until(lambda: (self.store.get(f"engine/{number}") or {}).get("life") == life)
        return engine

    def announce(self, number: int, life: int = 0) -> None:
        """An engine that is there and does nothing."""
        self.store.set(f"engine/{number}", {"life": life, "probe": []})

    def kill(self, number: int, life: int = 0) -> None:
        """End its process, as the supervisor finds it."""
        if number in self._ended:
            self._ended[number].set()
            self._threads.pop(number).join()
        self.store.set(f"gone/rollout.{number}", life)

    def publisher(
        self, *, timeout_s: float = TIMEOUT_S, on_wait: Callable[[], None] = lambda: None, num_engines: int = 2
    ) -> Any:
        from towline.jobs.weight_sync import Publisher

        def wait() -> None:
            self.beats.append("publish")
            on_wait()

        trainer: Any = self.trainer
        return Publisher(
            store=self.store,
            engine=trainer,
            num_engines=num_engines,
            wire_dtype="float32",
            timeout_s=timeout_s,
            on_wait=wait,
            settle=self.settle,
            attempt=self._attempt,
        )

    def settle(self, version: int, digest: str) -> int:
        self.settled.append((version, digest))
        return self.branch

    def _client(self) -> ControlStore:
        return ControlStore(self._handle.address, KEY, self._attempt)

    def _serve(self, number: int, engine: ScriptedEngine, life: int, ended: threading.Event, model: str) -> None:
        from towline.jobs.weight_sync import Subscriber

        def beat(phase: str) -> None:
            self.beats.append(phase)
            if ended.is_set():
                raise Ended

        subscriber = self.subscribers[number] = Subscriber(self._client(), engine, number, beat, life)
        try:
            subscriber.introduce(model)
            while not ended.is_set():
                subscriber.serve()
                time.sleep(0.005)
        except Ended:
            pass

    def close(self) -> None:
        for ended in self._ended.values():
            ended.set()
        for thread in self._threads.values():
            thread.join()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.005)


@pytest.fixture
def fleet(handle: StoreHandle) -> Iterator[Fleet]:
    fleet = Fleet(handle, attempt=next(ATTEMPTS))
    yield fleet
    fleet.close()


class MisreadingEngine(ScriptedEngine):
    """Reports another digest than it received, the first `num_times`."""

    def __init__(self, num_times: int) -> None:
        super().__init__(noise_script(32))
        self._left = num_times
        self.received: list[int] = []

    def receive(self, version: int, timeout_s: float) -> str:
        digest = super().receive(version, timeout_s)
        self.received.append(version)
        self._left -= 1
        return digest if self._left < 0 else "0" * 64


def scripted() -> ScriptedEngine:
    return ScriptedEngine(noise_script(32))


def test_a_version_arrives_at_every_engine_and_each_answers_the_probe_with_it(fleet: Fleet):
    engines = [fleet.start(number) for number in range(2)]
    publisher = fleet.publisher()
    for version in (1, 2, 5):
        probes = publisher.publish(version)
        assert [engine.version for engine in engines] == [version, version]
        assert probes == [engine.score(PROBE_TOKENS) for engine in engines]
    digests = fleet.subscribers[0].digests
    assert fleet.subscribers[1].digests == digests
    assert list(digests.items()) == fleet.settled
    assert [version for version, _ in fleet.settled] == [1, 2, 5]
    assert len({digest for _, digest in fleet.settled}) == 3
    assert publisher.digest == digests[5]
    assert {"receive weights", "probe"} <= set(fleet.beats)


def test_an_engine_says_what_it_computes_with_the_weights_it_loaded(fleet: Fleet):
    engine = fleet.start(0)
    assert fleet.store.get("engine/0") == {"life": 0, "probe": engine.score(PROBE_TOKENS), "model": ""}
    assert not fleet.subscribers[0].has_weights
    fleet.publisher().publish(1)
    assert fleet.subscribers[0].has_weights


def test_engines_that_loaded_the_trainers_folder_take_their_weights_for_the_version_and_nothing_is_sent(fleet: Fleet):
    engines = [fleet.start(number, model="m") for number in range(2)]
    fleet.branch = 3
    publisher = fleet.publisher()
    digest = publisher.present_digest(0)
    assert publisher.adopt(0, digest, "m")
    until(lambda: all(fleet.subscribers[number].has_weights for number in range(2)))
    assert [engine.version for engine in engines] == [0, 0]
    assert [fleet.subscribers[number].branch for number in range(2)] == [3, 3]
    assert fleet.subscribers[0].digests == {0: digest}
    assert fleet.settled == [(0, digest)]
    assert "receive weights" not in fleet.beats
    assert not publisher.has_lost_every_engine
    # The same weights sent as the same version have the same digest.
    publisher.publish(0)
    assert publisher.digest == digest


def test_an_engine_with_another_model_is_sent_the_weights(fleet: Fleet):
    fleet.start(0, model="m")
    fleet.start(1, model="other")
    publisher = fleet.publisher()
    assert not publisher.adopt(0, publisher.present_digest(0), "m")
    assert fleet.settled == []
    assert not fleet.subscribers[0].has_weights
    publisher.publish(0)
    assert fleet.subscribers[1].has_weights


def test_an_engine_that_was_started_again_does_not_take_its_weights_for_an_adopted_version(fleet: Fleet):
    """By then the policy may have moved on."""
    fleet.start(0, model="m")
    publisher = fleet.publisher()
    publisher.adopt(0, publisher.present_digest(0), "m")
    fleet.kill(0)
    fleet.start(0, life=1, model="m")
    time.sleep(0.1)
    assert not fleet.subscribers[0].has_weights
    assert publisher.has_lost_every_engine


def test_between_a_trial_and_its_version_an_engine_may_not_generate(fleet: Fleet):
    fleet.start(0)
    publisher = fleet.publisher()
    publisher.publish(1)
    assert fleet.subscribers[0].has_weights
    publisher.publish(2, is_trial=True)
    assert not fleet.subscribers[0].has_weights
    assert 2 not in fleet.subscribers[0].digests
    publisher.publish(2)
    assert fleet.subscribers[0].has_weights


def test_the_same_version_can_be_published_again_with_other_weights(fleet: Fleet):
    fleet.start(0)
    publisher = fleet.publisher()
    publisher.publish(0)
    fleet.trainer.weights["embed.weight"].add_(1.0)
    publisher.publish(0)
    (_, first), (_, second) = fleet.settled
    assert first != second
    assert fleet.subscribers[0].digests == {0: second}


def test_a_version_is_settled_before_any_engine_computes_with_it_and_its_branch_is_passed_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
):
    engines = [fleet.start(number) for number in range(2)]
    at_settling: list[int] = []

    def settle(version: int, digest: str) -> int:
        at_settling.extend(engine.version for engine in engines)
        return 4

    monkeypatch.setattr(fleet, "settle", settle)
    fleet.publisher().publish(7)
    assert at_settling == [0, 0]
    assert [fleet.subscribers[number].branch for number in range(2)] == [4, 4]


def test_a_trial_reaches_the_engines_and_is_not_settled(fleet: Fleet):
    engine = fleet.start(0)
    publisher = fleet.publisher()
    fleet.branch = 2
    assert publisher.publish(3, is_trial=True) == [engine.score(PROBE_TOKENS)]
    assert (engine.version, fleet.settled, fleet.subscribers[0].branch) == (3, [], 0)
    publisher.publish(3)
    assert (engine.version, len(fleet.settled), fleet.subscribers[0].branch) == (3, 1, 2)


def test_weights_are_sent_again_once_when_an_engine_received_other_bytes(fleet: Fleet):
    engines = [fleet.start(0), fleet.start(1, misreading := MisreadingEngine(1))]
    assert len(fleet.publisher().publish(3)) == 2
    assert [engine.version for engine in engines] == [3, 3]
    assert misreading.received == [3, 3]
    assert [version for version, _ in fleet.settled] == [3]
    assert fleet.store.get("restart/rollout.1") is None


def test_an_engine_that_receives_other_bytes_twice_is_to_be_started_again_and_the_others_go_on(fleet: Fleet):
    engines = [fleet.start(0), fleet.start(1, misreading := MisreadingEngine(9))]
    publisher = fleet.publisher()
    assert len(publisher.publish(3)) == 1
    assert [engine.version for engine in engines] == [3, 0]
    assert misreading.received == [3, 3]
    assert fleet.store.get("restart/rollout.1") == {
        "life": 0,
        "why": "engine 1 received other bytes than were sent as version 3 (time 2)",
    }
    # It is not asked again as long as its old life is the latest.
    assert len(publisher.publish(4)) == 1
    assert misreading.received == [3, 3]


def test_a_third_time_after_its_restart_ends_the_run_by_name(fleet: Fleet):
    healthy = fleet.start(0)
    fleet.start(1, MisreadingEngine(9))
    publisher = fleet.publisher()
    publisher.publish(3)
    fleet.kill(1)
    fleet.start(1, again := MisreadingEngine(9), life=1)
    with pytest.raises(TransferError, match=r"engine 1 .* version 4 \(time 3\), although it was started again: memory"):
        publisher.publish(4)
    assert again.received == [4]
    assert (healthy.version, again.version) == (3, 0)
    assert [version for version, _ in fleet.settled] == [3]


def test_an_engine_that_receives_well_after_its_restart_is_no_longer_suspected(fleet: Fleet):
    fleet.start(0)
    fleet.start(1, MisreadingEngine(9))
    publisher = fleet.publisher()
    publisher.publish(3)
    fleet.kill(1)
    second_life = fleet.start(1, MisreadingEngine(0), life=1)
    assert len(publisher.publish(4)) == 2
    second_life._left = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert len(publisher.publish(5)) == 2
    assert second_life.version == 5


def test_an_engine_that_never_answers_is_left_out_and_may_come_back(fleet: Fleet):
    # case G6-13: an engine that is there and does nothing
    serving = fleet.start(0)
    fleet.announce(1)
    publisher = fleet.publisher(timeout_s=1.0)
    assert len(publisher.publish(3)) == 1
    assert serving.version == 3
    late = fleet.start(1)
    publisher.timeout_s = TIMEOUT_S
    assert len(publisher.publish(4)) == 2
    assert (serving.version, late.version) == (4, 4)


def test_an_engine_that_hangs_while_it_receives_is_left_out_and_never_steps_on_the_version(fleet: Fleet):
    wakes = threading.Event()

    class HangingEngine(ScriptedEngine):
        def receive(self, version: int, timeout_s: float) -> str:
            digest = super().receive(version, timeout_s)
            wakes.wait(20)
            return digest

    serving, hanging = fleet.start(0), fleet.start(1, HangingEngine(noise_script(32)))
    assert len(fleet.publisher(timeout_s=1.0).publish(3)) == 1
    wakes.set()
    assert (serving.version, hanging.version) == (3, 0)
    assert [version for version, _ in fleet.settled] == [3]


def test_an_engine_that_ends_instead_of_answering_is_not_waited_for(fleet: Fleet):
    serving = fleet.start(0)
    fleet.announce(1)
    waits = itertools.count()
    publisher = fleet.publisher(timeout_s=10_000.0, on_wait=lambda: fleet.kill(1) if next(waits) == 3 else None)
    assert len(publisher.publish(3)) == 1
    assert serving.version == 3


def test_a_new_life_is_taken_in_at_the_next_publication(fleet: Fleet):
    survivor = fleet.start(0)
    fleet.start(1)
    publisher = fleet.publisher()
    publisher.publish(1)
    fleet.kill(1)
    assert len(publisher.publish(2)) == 1
    joiner = fleet.start(1, life=1)
    assert (joiner.version, fleet.subscribers[1].has_weights) == (0, False)
    assert len(publisher.publish(3)) == 2
    assert (survivor.version, joiner.version) == (3, 3)
    assert list(fleet.subscribers[1].digests) == [3]


def test_an_engine_is_lost_when_no_life_that_has_the_weights_is_left(fleet: Fleet):
    publisher = fleet.publisher(num_engines=1)
    fleet.start(0)
    publisher.publish(1)
    assert not publisher.has_lost_every_engine
    fleet.kill(0)
    assert not publisher.has_lost_every_engine, "nobody is there to publish to yet"
    fleet.start(0, life=1)
    assert publisher.has_lost_every_engine
    publisher.publish(1)
    assert not publisher.has_lost_every_engine


def test_one_of_two_engines_is_not_every_engine(fleet: Fleet):
    fleet.start(0)
    fleet.start(1)
    publisher = fleet.publisher()
    publisher.publish(1)
    fleet.kill(1)
    fleet.start(1, life=1)
    assert not publisher.has_lost_every_engine


def test_an_engine_that_ends_while_it_joins_holds_nobody_up_for_long(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    # The other members wait for it no longer than this, and not for the group's own time-out.
    monkeypatch.setattr(TransferGroup.__init__, "__defaults__", (1.0, lambda: None))

    class DyingEngine(ScriptedEngine):
        def join(self, request: JoinRequest) -> None:
            fleet.store.set("gone/rollout.1", 0)
            raise Ended

    serving = fleet.start(0)
    fleet.start(1, DyingEngine(noise_script(32)))
    assert len(fleet.publisher().publish(3)) == 1
    assert serving.version == 3


def test_the_gathers_are_walked_though_the_group_does_not_form(fleet: Fleet, monkeypatch: pytest.MonkeyPatch):
    """The other ranks are on their way through them, and would hang there."""
    # case G6-09
    from towline.jobs import weight_sync

    forming = [0]
    form = weight_sync.TransferGroup

    def fail_once(*arguments: Any, **options: Any) -> Any:
        forming[0] += 1
        if forming[0] == 1:
            raise TransferError("a member did not come")
        return form(*arguments, **options)

    monkeypatch.setattr(weight_sync, "TransferGroup", fail_once)
    monkeypatch.setattr(TransferGroup.__init__, "__defaults__", (1.0, lambda: None))
    fleet.start(0)
    assert len(fleet.publisher(num_engines=1).publish(1)) == 1
    assert forming[0] == 2
    assert fleet.trainer.num_gathered == 2 * len(fleet.trainer.weights)


def test_a_publication_that_nobody_takes_up_is_given_up_at_last(fleet: Fleet):
    fleet.announce(0)
    with pytest.raises(TransferError, match="weights of version 3 reached no engine in 5 tries"):
        fleet.publisher(timeout_s=0.1).publish(3)
    assert fleet.beats.count("publish") >= 5, "it keeps beating while it waits"
    assert fleet.settled == []
