"""The wire format of weights: what lies where, byte for byte."""

import hashlib
import json
import math
import random

import pytest

from towline.storage.errors import TransferError
from towline.storage.weight_stream import BUCKET_BYTES, Bucket, Slot, StreamHeader, TensorMeta


def tensor(name: str, *shape: int, dtype: str = "float32") -> TensorMeta:
    return TensorMeta(name=name, dtype=dtype, shape=shape)


def header(*tensors: TensorMeta, bucket_bytes: int = 64, version: int = 7) -> StreamHeader:
    return StreamHeader(version=version, tensors=tensors, bucket_bytes=bucket_bytes)


def layout(*tensors: TensorMeta) -> list[tuple[list[tuple[int, int, int]], int]]:
    """Index, start and stop of each slot, and the size, of each bucket of 64 bytes."""
    buckets = header(*tensors).buckets()
    return [([(slot.index, slot.start, slot.stop) for slot in bucket.slots], bucket.num_bytes) for bucket in buckets]


def test_a_tensor_s_bytes_are_its_elements_by_their_type() -> None:
    assert tensor("a", 3, 5).num_bytes == 60
    assert tensor("a", 3, 5, dtype="bfloat16").num_bytes == tensor("a", 3, 5, dtype="float16").num_bytes == 30
    assert tensor("a").num_bytes == 4
    assert tensor("a", 0, 8).num_bytes == 0


def test_tensors_lie_aligned_one_after_the_other() -> None:
    tensors = tensor("a", 5), tensor("b", 1, dtype="bfloat16"), tensor("c", 4)
    assert layout(*tensors) == [([(0, 0, 20), (1, 32, 34), (2, 48, 64)], 64)]


def test_a_tensor_that_does_not_fit_begins_the_next_bucket_whole() -> None:
    assert layout(tensor("a", 8), tensor("b", 9), tensor("c", 4)) == [
        ([(0, 0, 32)], 32),
        ([(1, 0, 36), (2, 48, 64)], 64),
    ]


def test_a_tensor_that_fits_exactly_closes_its_bucket() -> None:
    # case G6-08: (8, 4) of 2 bytes each are 64, by the full shape
    full = [tensor(str(number), 8, 4, dtype="bfloat16") for number in range(3)]
    assert layout(*full) == [([(0, 0, 64)], 64), ([(1, 0, 64)], 64), ([(2, 0, 64)], 64)]
    assert layout(tensor("a", 16), tensor("b", 1)) == [([(0, 0, 64)], 64), ([(1, 0, 4)], 16)]
    # 60 bytes and 4 make 64, but the second would begin at 64
    assert layout(tensor("a", 15), tensor("b", 1)) == [([(0, 0, 60)], 64), ([(1, 0, 4)], 16)]


def test_a_tensor_larger_than_a_bucket_has_one_of_its_own() -> None:
    assert layout(tensor("a", 2), tensor("b", 40), tensor("c", 2)) == [
        ([(0, 0, 8)], 16),
        ([(1, 0, 160)], 160),
        ([(2, 0, 8)], 16),
    ]


def test_empty_and_scalar_tensors_have_their_place() -> None:
    assert layout(tensor("a", 0), tensor("b"), tensor("c", 0)) == [([(0, 0, 0), (1, 0, 4), (2, 16, 16)], 16)]
    assert layout() == []


def test_buckets_of_any_tensors_hold_each_once_in_order_aligned_and_apart() -> None:
    for seed in range(200):
        generator = random.Random(seed)
        tensors = [
            tensor(
                str(number),
                *(generator.randrange(0, 7) for _ in range(generator.randrange(0, 4))),
                dtype=generator.choice(["float32", "bfloat16", "float16"]),
            )
            for number in range(generator.randrange(0, 30))
        ]
        limit = generator.choice([16, 64, 100, 1000])
        buckets = header(*tensors, bucket_bytes=limit).buckets()
        slots = [slot for bucket in buckets for slot in bucket.slots]
        assert [slot.index for slot in slots] == list(range(len(tensors)))
        assert [slot.stop - slot.start for slot in slots] == [tensor.num_bytes for tensor in tensors]
        for bucket in buckets:
            assert all(slot.start % 16 == 0 for slot in bucket.slots)
            stops = [0, *(slot.stop for slot in bucket.slots)]
            assert all(slot.start >= stop for slot, stop in zip(bucket.slots, stops, strict=False))
            assert stops[-1] <= bucket.num_bytes == math.ceil(stops[-1] / 16) * 16
            assert len(bucket.slots) == 1 or stops[-1] <= limit


def test_the_usual_bucket_is_64_mib() -> None:
    assert StreamHeader(version=0, tensors=()).bucket_bytes == BUCKET_BYTES == 67_108_864
    large = StreamHeader(version=0, tensors=tuple(tensor(str(number), 1024, 4096) for number in range(9)))
    assert [len(bucket.slots) for bucket in large.buckets()] == [4, 4, 1]


def test_a_header_comes_back_equal_and_to_the_same_bytes() -> None:
    sent = header(tensor("modèle.weight", 3, 5, dtype="bfloat16"), tensor("b"), bucket_bytes=128, version=2**40)
    received = StreamHeader.from_bytes(sent.to_bytes())
    assert received == sent
    assert received.to_bytes() == sent.to_bytes()
    assert received.buckets() == sent.buckets()
    assert received.tensors[0].shape == (3, 5)


def test_header_and_layout_have_these_bytes() -> None:
    """Both ends hash these: a change of the format must be meant."""
    sent = header(tensor("a", 5), tensor("b", 2, 20, dtype="bfloat16"), tensor("c"))
    assert sent.to_bytes() == (
        b'{"version": 7, "tensors": [{"name": "a", "dtype": "float32", "shape": [5]}, '
        b'{"name": "b", "dtype": "bfloat16", "shape": [2, 20]}, {"name": "c", "dtype": "float32", "shape": []}], '
        b'"bucket_bytes": 64}'
    )
    assert sent.buckets() == [
        Bucket(slots=(Slot(index=0, start=0, stop=20),), num_bytes=32),
        Bucket(slots=(Slot(index=1, start=0, stop=80),), num_bytes=80),
        Bucket(slots=(Slot(index=2, start=0, stop=4),), num_bytes=16),
    ]
    hasher = hashlib.blake2b(sent.to_bytes(), digest_size=32)
    for bucket in sent.buckets():
        flat = bytearray(bucket.num_bytes)
        for slot in bucket.slots:
            flat[slot.start : slot.stop] = bytes([slot.index + 1]) * (slot.stop - slot.start)
        hasher.update(flat)
    assert hasher.hexdigest() == "48836bb7671e704212da44482d57f6dc2dbcb671fd2561ec9f88ff56888d41d8"


def test_damaged_headers_are_refused_as_a_broken_transfer() -> None:
    sound = header(tensor("a", 5))
    fields = json.loads(sound.to_bytes())
    broken = [
        b"",
        b"\xff\xfe",
        sound.to_bytes()[:-5],
        b"[]",
        json.dumps(fields | {"tensors": None}).encode(),
        json.dumps({"version": 1, "tensors": []}).encode(),
        json.dumps(fields | {"tensors": [{"name": "a", "dtype": "int8", "shape": [5]}]}).encode(),
        json.dumps(fields | {"tensors": [{"name": "a", "dtype": "float32", "shape": 5}]}).encode(),
        json.dumps(fields | {"tensors": [{"name": "a", "dtype": "float32", "shape": ["5", "x"]}]}).encode(),
    ]
    for data in broken:
        with pytest.raises(TransferError, match="header of a weight stream arrived damaged"):
            StreamHeader.from_bytes(data)
