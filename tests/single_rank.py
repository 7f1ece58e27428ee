"""A trainer's default group of one rank, for tests in this process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def single_rank() -> Iterator[None]:
    """Inside the block there is one, and it stays: DeepSpeed remembers the first that it met in a process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
