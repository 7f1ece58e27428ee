"""A publisher and a receiver over gloo: in one process where both are well, in two where the receiver fails."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from towline.rollout.receive_stream import receive_stream
from towline.rollout.transfer_group import Membership, TransferGroup
from towline.storage.errors import TransferError
from towline.storage.weight_stream import BUCKET_BYTES, TensorMeta
from towline.trainer.weight_publisher import publish_weights, weights_digest

WORKER = Path(__file__).parent / "weight_receiver_worker.py"
LARGE = BUCKET_BYTES // 4 + 1000
"""Numbers of a float32 tensor that is larger than a bucket."""


class FakeEngine:
    """Weights in memory. Remembers what was gathered, as other ranks would have to."""

    def __init__(self, weights):
        self.weights = weights
        self.walked = []

    def tensors(self):
        return [
            TensorMeta(name=name, dtype=str(weight.dtype).removeprefix("torch."), shape=tuple(weight.shape))
            for name, weight in self.weights.items()
        ]

    @contextlib.contextmanager
    def gathered(self, indices):
        self.walked += indices
        yield [list(self.weights.values())[index] for index in indices]


def small_weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "embed.weight": torch.randn(30, 7, generator=generator),
        "norm.weight": torch.randn(5, generator=generator).requires_grad_(),
        "head.bias": torch.randn(3, 1, 2, generator=generator),
    }


def large_weights(number=4):
    """One tensor a bucket."""
    return {f"{index}.weight": torch.full((LARGE,), float(index)) for index in range(number)}


@pytest.fixture(scope="module")
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def join(store, prefix, rank):
    address = f"127.0.0.1:{store.port}"
    return TransferGroup(Membership(store=address, prefix=prefix, rank=rank, size=2, backend="gloo"))


@contextlib.contextmanager
def both_ends(store, prefix):
    """The publisher's group and a thread that receives `count` streams into a list."""
    with ThreadPoolExecutor(max_workers=1) as thread:

        def receive(count):
            group = join(store, prefix, rank=1)
            return [receive_stream(group, timeout_s=60) for _ in range(count)]

        yield lambda count: thread.submit(receive, count)


def test_a_float32_stream_arrives_to_the_bit(store):
    engine = FakeEngine(small_weights())
    with both_ends(store, "float32") as receive:
        received = receive(1)
        digest = publish_weights(engine, 5, sender=join(store, "float32", 0), wire_dtype="float32", timeout_s=60)
        ((header, named, received_digest),) = received.result()
    assert received_digest == digest
    assert header.version == 5
    assert [(name, tuple(tensor.shape)) for name, tensor in named] == [
        ("embed.weight", (30, 7)), ("norm.weight", (5,)), ("head.bias", (3, 1, 2)),
    ]  # fmt: skip
    for name, tensor in named:
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, engine.weights[name]), name
    assert engine.walked == [0, 1, 2]


@pytest.mark.parametrize(("held", "wire"), [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_weights_are_rounded_to_the_wire_and_no_further(store, held, wire):
    engine = FakeEngine({name: weight.to(getattr(torch, held)) for name, weight in small_weights().items()})
    prefix = f"{held}-{wire}"
    with both_ends(store, prefix) as receive:
        received = receive(1)
        digest = publish_weights(engine, 1, sender=join(store, prefix, 0), wire_dtype=wire, timeout_s=60)
        ((header, named, received_digest),) = received.result()
    assert received_digest == digest
    assert {meta.dtype for meta in header.tensors} == {wire}
    for name, tensor in named:
        assert torch.equal(tensor, engine.weights[name].to(getattr(torch, wire))), name


def test_weights_are_rounded_once_to_the_nearest(store):
    # case G6-10: bfloat16 has 7 bits behind the point, and numbers without exponent down to 2**-133
    engine = FakeEngine({"w": torch.tensor([1.0009765625, -3e38, 1e-40, 1.00390625, 1.01171875])})
    with both_ends(store, "nearest") as receive:
        received = receive(1)
        digest = publish_weights(engine, 1, sender=join(store, "nearest", 0), wire_dtype="bfloat16", timeout_s=60)
        ((_, ((_, tensor),), received_digest),) = received.result()
    assert tensor.dtype == torch.bfloat16
    # ties, 1 + 2**-8 and 1 + 3 * 2**-8, go to the even neighbour
    assert tensor.double().tolist() == [1.0, -226.0 * 2**120, 2.0**-133, 1.0, 1.015625]
    assert received_digest == digest


@pytest.mark.parametrize("shape", [(0,), (4,), (1, 4), (32,), (4, 8)])
def test_a_shard_or_a_tensor_of_another_shape_is_not_sent(shape):
    # cases G6-08, G6-10: (4,) and (1, 4) would be broadcast to what the header says
    class OtherShape(FakeEngine):
        def tensors(self):
            return [TensorMeta(name="w", dtype="bfloat16", shape=(8, 4))]

    engine = OtherShape({"w": torch.zeros(shape, dtype=torch.bfloat16)})
    with pytest.raises(AssertionError, match=r"w has shape .*, not \(8, 4\)"):
        weights_digest(engine, 1, wire_dtype="bfloat16", is_first_rank=True)


class SlowSender:
    device = torch.device("cpu")

    def broadcast(self, tensor):
        time.sleep(0.05)

    def finish(self, work, deadline, on_wait):
        time.sleep(0.05)


def test_every_rank_enters_every_gather_however_slow_the_sender_is(store):
    # case G6-09: each gather is a collective of two ranks, and one of them sends
    def publish(rank):
        members = dist.PrefixStore("gathers", dist.TCPStore("127.0.0.1", store.port, is_master=False))
        group = dist.ProcessGroupGloo(members, rank, 2, timedelta(seconds=30))

        class Rank(FakeEngine):
            @contextlib.contextmanager
            def gathered(self, indices):
                group.barrier().wait()
                with super().gathered(indices) as tensors:
                    yield tensors
                group.barrier().wait()

        engine = Rank(large_weights(3))
        publish_weights(engine, 1, sender=SlowSender() if rank == 0 else None, wire_dtype="bfloat16", timeout_s=60)
        return engine.walked

    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=2) as ranks:
        assert list(ranks.map(publish, (0, 1))) == [[0, 1, 2], [0, 1, 2]]
    assert time.monotonic() - began < 30


def test_a_tensor_larger_than_a_bucket_arrives(store):
    weights = {"first": torch.arange(10.0), "large": torch.arange(float(LARGE)), "last": torch.arange(3.0)}
    engine = FakeEngine(weights)
    with both_ends(store, "large") as receive:
        received = receive(1)
        digest = publish_weights(engine, 1, sender=join(store, "large", 0), wire_dtype="float32", timeout_s=60)
        ((header, named, received_digest),) = received.result()
    assert received_digest == digest
    assert [len(bucket.slots) for bucket in header.buckets()] == [1, 1, 1]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in named)


def test_a_group_carries_several_versions_and_their_digests_differ(store):
    engine = FakeEngine(small_weights())
    with both_ends(store, "several") as receive:
        received = receive(3)
        sender = join(store, "several", 0)
        digests = [publish_weights(engine, 1, sender=sender, wire_dtype="float32", timeout_s=60)]
        engine.weights["head.bias"][2, 0, 1] += 1e-6
        digests += [
            publish_weights(engine, version, sender=sender, wire_dtype="float32", timeout_s=60) for version in (1, 2)
        ]
        streams = received.result()
    assert [digest for _, _, digest in streams] == digests
    assert [header.version for header, _, _ in streams] == [1, 1, 2]
    assert len(set(digests)) == 3


def test_a_rank_without_a_sender_walks_the_same_gathers():
    # case G6-09
    engine = FakeEngine(large_weights(2))
    assert publish_weights(engine, 1, sender=None, wire_dtype="float32", timeout_s=1) == ""
    assert engine.walked == [0, 1]


class RefusingSender:
    """As NCCL may: the broadcast itself raises, at once."""

    device = torch.device("cpu")

    def broadcast(self, tensor):
        raise TransferError("no way out")

    def finish(self, work, deadline, on_wait):
        raise AssertionError("nothing was started")


def test_a_broadcast_that_cannot_be_started_still_walks_every_gather():
    engine = FakeEngine(large_weights(2))
    with pytest.raises(TransferError, match="no way out"):
        publish_weights(engine, 1, sender=RefusingSender(), wire_dtype="float32", timeout_s=60)
    assert engine.walked == [0, 1]


# --- a receiver that fails ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def failing_receiver(store, prefix, name, transfers):
    """The publisher's group with a member in another process."""
    arguments = [f"127.0.0.1:{store.port}", prefix, name, str(transfers)]
    process = subprocess.Popen(
        [sys.executable, WORKER, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield join(store, prefix, 0), process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("transfers", [1, 2, 4], ids=["after the length", "after the header", "after two buckets"])
def test_a_receiver_killed_on_the_way_is_noticed_at_once_and_every_gather_walked(store, transfers):
    engine = FakeEngine(large_weights())
    with failing_receiver(store, f"killed-{transfers}", "SIGKILL", transfers) as (sender, _):
        began = time.monotonic()
        with pytest.raises(TransferError, match=rf"weight transfer killed-{transfers} broke off: "):
            publish_weights(engine, 1, sender=sender, wire_dtype="float32", timeout_s=60)
        assert time.monotonic() - began < 15
    assert engine.walked == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_receiver_gone_before_the_first_byte_is_noticed_and_every_gather_walked(store):
    engine = FakeEngine(large_weights())
    with failing_receiver(store, "gone", "SIGKILL", 0) as (sender, process):
        assert process.wait(timeout=60) == -signal.SIGKILL
        with pytest.raises(TransferError, match="weight transfer gone broke off"):
            publish_weights(engine, 1, sender=sender, wire_dtype="float32", timeout_s=60)
    assert engine.walked == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_silent_receiver_is_given_up_at_the_deadline_while_signals_are_served(store):
    engine = FakeEngine(large_weights())
    waits, served = [], []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: served.append(time.monotonic()))
    with failing_receiver(store, "silent", "SIGSTOP", 3) as (sender, _):
        began = time.monotonic()
        # Long enough for everything before the stop, also on a busy machine.
        alarm = threading.Timer(5, os.kill, (os.getpid(), signal.SIGUSR1))
        alarm.start()
        try:
            with pytest.raises(TransferError, match=r"silent: a member is silent past the deadline. Raise"):
                publish_weights(
                    engine, 1, sender=sender, wire_dtype="float32", timeout_s=8,
                    on_wait=lambda: waits.append(time.monotonic()),
                )  # fmt: skip
        finally:
            alarm.join()
            signal.signal(signal.SIGUSR1, before)
        ended = time.monotonic()
    assert 8 <= ended - began < 12
    assert engine.walked == [0, 1, 2, 3]
    assert len(waits) > 50
    assert 4.9 < served[0] - began < 7


@pytest.mark.slow
def test_a_new_group_forms_in_the_same_process_after_a_broken_one(store):
    engine = FakeEngine(small_weights())
    with failing_receiver(store, "broken", "SIGSTOP", 2) as (sender, _):
        with pytest.raises(TransferError):
            publish_weights(engine, 1, sender=sender, wire_dtype="float32", timeout_s=1)
        with both_ends(store, "mended") as receive:
            received = receive(1)
            digest = publish_weights(engine, 1, sender=join(store, "mended", 0), wire_dtype="float32", timeout_s=60)
            assert received.result()[0][2] == digest
