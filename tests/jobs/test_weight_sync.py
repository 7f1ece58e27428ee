"""A publication from the trainer's half to two engines: commit, try again, refuse; and who is blamed for silence.

Everything is real but the model: control store, transfer group, publisher, subscribers. The engines are scripted.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from towline.jobs.control_store import ControlStore
from towline.jobs.store_handle import StoreHandle
from towline.rollout.scripted_engine import ScriptedEngine, noise_script
from towline.storage.errors import StoreError, TowlineError, TransferError
from towline.storage.weight_stream import TensorMeta

KEY = b"key"
PROBE_TOKENS = [3, 1, 4, 1, 5]
TIMEOUT_S = 20.0

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

    def tensors(self) -> list[TensorMeta]:
        return [
            TensorMeta(name=name, dtype="float32", shape=tuple(tensor.shape)) for name, tensor in self.weights.items()
        ]

    @contextmanager
    def gathered(self, indices: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        yield [list(self.weights.values())[index] for index in indices]


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreHandle]:
    handle = StoreHandle(KEY, 0, tmp_path_factory.mktemp("store") / "store.log")
    yield handle
    handle.close()


@pytest.fixture(scope="module", autouse=True)
def trainer_group() -> Iterator[None]:
    """The trainer's default group, of one rank."""
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    if is_ours:
        dist.destroy_process_group()


class Fleet:
    """Engines that serve in threads, and the publisher."""

    def __init__(self, handle: StoreHandle, attempt: int) -> None:
        self._handle, self._attempt = handle, attempt
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.store = self._client()
        self.store.set("probe_tokens", PROBE_TOKENS)
        self.trainer = Trainer()
        self.digests: dict[int, dict[int, str]] = {}
        self.beats: list[str] = []
        self.errors: list[TowlineError] = []
        """Of the engines' threads: what would have ended their processes."""

    def start(self, number: int, engine: ScriptedEngine) -> ScriptedEngine:
        thread = threading.Thread(target=self._serve, args=(number, engine))
        thread.start()
        self._threads.append(thread)
        return engine

    def publisher(self, *, num_engines: int = 2, timeout_s: float = TIMEOUT_S) -> Any:
        from towline.jobs.weight_sync import Publisher

        trainer: Any = self.trainer
        return Publisher(
            store=self.store,
            engine=trainer,
            num_engines=num_engines,
            wire_dtype="float32",
            timeout_s=timeout_s,
            on_wait=lambda: self.beats.append("publish"),
            attempt=self._attempt,
        )

    def _client(self) -> ControlStore:
        return ControlStore(self._handle.address, KEY, self._attempt)

    def _serve(self, number: int, engine: ScriptedEngine) -> None:
        from towline.jobs.weight_sync import Subscriber

        subscriber = Subscriber(self._client(), engine, number, self.beats.append)
        self.digests[number] = subscriber.digests
        try:
            while not self._stop.is_set():
                subscriber.serve()
                time.sleep(0.005)
        except TowlineError as error:
            self.errors.append(error)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


@pytest.fixture
def fleet(handle: StoreHandle, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    fleet = Fleet(handle, attempt=abs(hash(request.node.name)) % 2**32)
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
    engines = [fleet.start(number, scripted()) for number in range(2)]
    publisher = fleet.publisher()
    for version in (1, 2, 5):
        probes = publisher.publish(version)
        assert [engine.version for engine in engines] == [version, version]
        assert probes == [engine.score(PROBE_TOKENS) for engine in engines]
    assert fleet.digests[0] == fleet.digests[1]
    assert list(fleet.digests[0]) == [1, 2, 5]
    assert len(set(fleet.digests[0].values())) == 3
    assert {"receive weights", "probe"} <= set(fleet.beats)


def test_the_same_version_can_be_published_again_with_other_weights(fleet: Fleet):
    fleet.start(0, scripted())
    publisher = fleet.publisher(num_engines=1)
    publisher.publish(0)
    first = fleet.digests[0][0]
    fleet.trainer.weights["embed.weight"].add_(1.0)
    publisher.publish(0)
    assert fleet.digests[0][0] != first


def test_weights_are_sent_again_once_when_an_engine_received_other_bytes(fleet: Fleet):
    engines = [fleet.start(0, scripted()), fleet.start(1, misreading := MisreadingEngine(1))]
    fleet.publisher().publish(3)
    assert [engine.version for engine in engines] == [3, 3]
    assert misreading.received == [3, 3]


def test_an_engine_that_receives_other_bytes_twice_is_named_and_nobody_gets_the_version(fleet: Fleet):
    engines = [fleet.start(0, scripted()), fleet.start(1, misreading := MisreadingEngine(9))]
    with pytest.raises(TransferError, match=r"version 3 were refused 2 times: engine 1 received other bytes"):
        fleet.publisher().publish(3)
    assert [engine.version for engine in engines] == [0, 0]
    assert misreading.received == [3, 3]


def test_an_engine_that_never_answers_is_named_in_time(fleet: Fleet):
    # case G6-13: an engine that is there and does nothing
    fleet.store.set("ack/0/0", True)
    began = time.monotonic()
    with pytest.raises(StoreError, match=r"engine 1 did not take up the publication .* within 1 s .*ack"):
        fleet.publisher(timeout_s=1.0).publish(3)
    assert time.monotonic() - began < 1.5


def test_an_engine_that_hangs_while_it_receives_is_named_in_time(fleet: Fleet):
    class HangingEngine(ScriptedEngine):
        def receive(self, version: int, timeout_s: float) -> str:
            digest = super().receive(version, timeout_s)
            time.sleep(2.5)
            return digest

    fleet.start(0, scripted())
    fleet.start(1, HangingEngine(noise_script(32)))
    with pytest.raises(StoreError, match=r"engine 1 did not report the weights it received within 1 s"):
        fleet.publisher(timeout_s=1.0).publish(3)
    fleet.close()
    # Nobody was told an outcome, so the others' wait for it has a limit too.
    assert len(fleet.errors) == 2


def test_the_publisher_keeps_beating_while_it_waits(fleet: Fleet):
    with pytest.raises(StoreError):
        fleet.publisher(timeout_s=1.2).publish(3)
    assert fleet.beats.count("publish") >= 2
