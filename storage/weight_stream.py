"""The wire format of a weight publication, without the wire: a JSON header, then buckets of flat bytes.

Both ends hash header and buckets (blake2b); the receiver applies nothing before the digests agree. A tensor never
spans two buckets; one larger than a bucket gets its own. Tensors lie 16-byte aligned, gaps are zero.
"""

import json
import math
from dataclasses import asdict, dataclass

from towline.storage.errors import TransferError

BUCKET_BYTES = 64 << 20
ALIGNMENT = 16
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Place of one tensor in its bucket, bytes."""

    index: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    slots: tuple[Slot, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamHeader:
    version: int
    tensors: tuple[TensorMeta, ...]
    bucket_bytes: int = BUCKET_BYTES

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "StreamHeader":
        """Raises TransferError when the bytes are no header: they arrive before any digest can be compared."""
        try:
            fields = json.loads(data)
            tensors = tuple(
                TensorMeta(name=item["name"], dtype=item["dtype"], shape=tuple(item["shape"]))
                for item in fields["tensors"]
            )
            header = cls(version=fields["version"], tensors=tensors, bucket_bytes=fields["bucket_bytes"])
            header.buckets()
        except (ValueError, KeyError, TypeError) as error:
            raise TransferError(f"the header of a weight stream arrived damaged: {error!r}") from error
        return header

    def buckets(self) -> list[Bucket]:
        filled: list[Bucket] = []
        slots: list[Slot] = []
        used = 0
        for index, tensor in enumerate(self.tensors):
            if slots and used + tensor.num_bytes > self.bucket_bytes:
                filled.append(Bucket(slots=tuple(slots), num_bytes=used))
                slots, used = [], 0
            slots.append(Slot(index=index, start=used, stop=used + tensor.num_bytes))
            used += -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
        if slots:
            filled.append(Bucket(slots=tuple(slots), num_bytes=used))
        return filled


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What an engine needs to join a transfer group."""

    store: str
    """host:port of the control store, through which the group forms."""
    prefix: str
    """Fresh for each formation of the group."""
    first_rank: int
    """Rank of the engine's first worker; the publisher is rank 0."""
    size: int
    backend: str
    """ "gloo" or "nccl"."""
