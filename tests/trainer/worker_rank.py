"""What every worker of these tests does around its own work, as one rank under `mpirun`."""

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from towline.jobs.rendezvous import find_world


@contextmanager
def worker_rank(address: str, phase: str) -> Iterator[None]:
    """Inside the block the trainer's default group is there, and warnings of our own code are errors.

    Args:
        address: host:port of a store.
        phase: groups of different phases or sizes do not meet in it.
    """
    # Each ZeRO-3 engine collects garbage, for seconds if it has to look at all that was imported.
    gc.freeze()
    world = find_world()
    host, port = address.rsplit(":", 1)
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size), "LOCAL_RANK": str(world.local_rank)}
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": port}
    client = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    store = dist.PrefixStore(f"{phase}-{world.size}", client)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        warnings.filterwarnings("error")
        warnings.filterwarnings("ignore", module=r"(torch|torchao|deepspeed|transformers)\b")
        yield
    finally:
        dist.destroy_process_group()


def end_process() -> None:
    """As the roles do: threads of a group that is gone can abort the interpreter while it ends."""
    sys.stdout.flush()
    os._exit(0)
