"""The sending end of a weight publication: gather, copy, hash and send, one bucket behind the other.

Every rank walks the same gathers; rank 0 copies each bucket out of its gather and sends it on the transfer group while
the next is gathered on the trainer's own group. Imports torch only.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from towline.storage.errors import TransferError
from towline.storage.weight_stream import Bucket, StreamHeader, TensorMeta


class WeightSource(Protocol):
    """The part of a `DeepSpeedEngine` that is needed here."""

    def tensors(self) -> list[TensorMeta]: ...

    def gathered(self, indices: Sequence[int]) -> AbstractContextManager[list[torch.Tensor]]: ...


class Sender(Protocol):
    """A process group of which this process is member 0."""

    device: torch.device

    def broadcast(self, tensor: torch.Tensor) -> Any: ...

    def finish(self, work: Any, deadline: float, on_wait: Callable[[], None]) -> None: ...


def publish_weights(
    engine: WeightSource,
    version: int,
    *,
    sender: Sender | None,
    wire_dtype: str,
    timeout_s: float,
    on_wait: Callable[[], None] = lambda: None,
) -> str:
    """Broadcast all weights as `version` and return the digest of the stream ("" on ranks without a sender).

    Args:
        sender: on rank 0 only.
        wire_dtype: "float32" or "bfloat16"; weights are rounded to it before they are sent.
        timeout_s: for the whole stream.

    Raises:
        TransferError: a receiver is gone or silent. Raised after every gather has been walked, so that no other rank
            is left waiting in one.
    """
    header = StreamHeader(version=version, tensors=tuple(_as_sent(meta, wire_dtype) for meta in engine.tensors()))
    stream = _Stream(header, sender, time.monotonic() + timeout_s, on_wait) if sender is not None else None
    for bucket in header.buckets():
        with engine.gathered([slot.index for slot in bucket.slots]) as tensors:
            if stream is not None:
                stream.send(bucket, tensors)
    return stream.finish() if stream is not None else ""


def weights_digest(engine: WeightSource, version: int, *, wire_dtype: str, is_first_rank: bool) -> str:
    """The digest that publishing the present weights as `version` would have ("" on other ranks). All ranks call it."""
    sender = _Nobody() if is_first_rank else None
    return publish_weights(engine, version, sender=sender, wire_dtype=wire_dtype, timeout_s=float("inf"))


class _Nobody:
    """A group without receivers."""

    device = torch.device("cpu")

    def broadcast(self, tensor: torch.Tensor) -> None: ...

    def finish(self, work: None, deadline: float, on_wait: Callable[[], None]) -> None: ...


class _Stream:
    """Keeps one bucket on its way. A failed send is remembered and raised at the end."""

    def __init__(self, header: StreamHeader, sender: Sender, deadline: float, on_wait: Callable[[], None]) -> None:
        self._header, self._sender, self._deadline, self._on_wait = header, sender, deadline, on_wait
        self._hasher = hashlib.blake2b(digest_size=32)
        self._hash_thread = ThreadPoolExecutor(max_workers=1)
        self._hashing: Future[None] | None = None
        self._work: tuple[Any, torch.Tensor] | None = None
        self._failure: TransferError | None = None
        data = bytearray(header.to_bytes())
        self._start(torch.tensor([len(data)], dtype=torch.int64), is_hashed=False)
        self._start(torch.frombuffer(data, dtype=torch.uint8), is_hashed=True)

    def send(self, bucket: Bucket, tensors: list[torch.Tensor]) -> None:
        flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
        for slot, tensor in zip(bucket.slots, tensors, strict=True):
            meta = self._header.tensors[slot.index]
            # What fits by broadcasting, or is a shard, is not the weight.
            assert tuple(tensor.shape) == meta.shape, f"{meta.name} has shape {tuple(tensor.shape)}, not {meta.shape}"
            place = flat[slot.start : slot.stop].view(getattr(torch, meta.dtype)).view(meta.shape)
            place.copy_(tensor)
        self._start(flat, is_hashed=True)

    def finish(self) -> str:
        self._await()
        self._hash_thread.shutdown()
        if self._failure is not None:
            raise self._failure
        return self._hasher.hexdigest()

    def _start(self, flat: torch.Tensor, *, is_hashed: bool) -> None:
        self._await()
        if self._failure is not None:
            return
        on_device = flat.to(self._sender.device)
        try:
            # The tensor is kept until its broadcast is done.
            self._work = (self._sender.broadcast(on_device), on_device)
        except TransferError as error:
            self._failure = error
            return
        if is_hashed:
            self._hashing = self._hash_thread.submit(self._hasher.update, flat.numpy().data)

    def _await(self) -> None:
        if self._hashing is not None:
            self._hashing.result()
            self._hashing = None
        if self._work is None:
            return
        work, _ = self._work
        self._work = None
        try:
            self._sender.finish(work, self._deadline, self._on_wait)
        except TransferError as error:
            self._failure = error


def _as_sent(meta: TensorMeta, wire_dtype: str) -> TensorMeta:
    return TensorMeta(name=meta.name, dtype=wire_dtype, shape=meta.shape)
