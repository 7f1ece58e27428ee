"""Read one weight stream from a transfer group into host memory. Imports torch, not vLLM."""

import hashlib
import time

import torch

from towline.rollout.transfer_group import TransferGroup
from towline.storage.weight_stream import StreamHeader


def receive_stream(group: TransferGroup, timeout_s: float) -> tuple[StreamHeader, list[tuple[str, torch.Tensor]], str]:
    """Return header, named tensors (views of host memory) and digest of one stream."""
    deadline = time.monotonic() + timeout_s
    hasher = hashlib.blake2b(digest_size=32)

    def receive(num_bytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        flat = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=group.device)
        group.finish(group.broadcast(flat), deadline, on_wait=lambda: None)
        return flat.cpu()

    header_bytes = receive(int(receive(8, torch.int64)))
    hasher.update(header_bytes.numpy().data)
    header = StreamHeader.from_bytes(header_bytes.numpy().tobytes())
    named: list[tuple[str, torch.Tensor]] = []
    for bucket in header.buckets():
        flat = receive(bucket.num_bytes)
        hasher.update(flat.numpy().data)
        for slot in bucket.slots:
            meta = header.tensors[slot.index]
            named.append((meta.name, flat[slot.start : slot.stop].view(getattr(torch, meta.dtype)).view(meta.shape)))
    return header, named, hasher.hexdigest()
