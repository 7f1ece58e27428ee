"""A trainer's default group of one rank, for tests in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def single_rank() -> Iterator[None]:
    """Inside the block there is one; where there was one before, it stays as it is."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
