"""Who am I among the trainer's ranks, and how they meet. MPI gives the ranks; torch's group forms over the store."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from towline.jobs.control_store import ControlStore
from towline.jobs.launched import RANK_VARIABLES
from towline.storage.errors import TowlineError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    rank: int
    size: int
    local_rank: int


def find_world() -> World:
    """Ask what launched us for rank and size, and refuse a launcher that made worlds of one out of many tasks.

    Under srun the variables are Slurm's and say nothing of MPI: there MPI itself is asked, unless the profile does
    without it.
    """
    expected = int(os.environ["TOWLINE_NUM_TASKS"])
    if os.environ.get("TOWLINE_MPI", "none") != "none":
        return _checked(_mpi_world(), expected)
    for rank, size, local_rank in RANK_VARIABLES:
        if rank in os.environ and size in os.environ:
            world = World(
                rank=int(os.environ[rank]), size=int(os.environ[size]), local_rank=int(os.environ.get(local_rank, 0))
            )
            break
    else:
        world = World(rank=0, size=1, local_rank=0)
    return _checked(world, expected)


def _mpi_world() -> World:
    """MPI's own answer. Initialising it also tells the launcher that this rank is up."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return World(rank=world.rank, size=world.size, local_rank=int(os.environ["SLURM_LOCALID"]))


def _checked(world: World, expected: int) -> World:
    if world.size != expected:
        raise TowlineError(
            f"MPI: {expected} tasks were started, but each sees a world of {world.size}. The launcher and the MPI "
            "library do not fit together; on Slurm set mpi in the profile to one of `srun --mpi=list`, as a rule pmix "
            "or pmi2, or to none."
        )
    return world


def join_trainer_group(store: ControlStore, world: World, attempt: int, timeout_s: float) -> None:
    """Form torch's default process group of the trainer ranks, over the control store: no port is guessed."""
    host, port = store.address.rsplit(":", 1)
    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        if world.local_rank >= torch.cuda.device_count():
            raise TowlineError(
                f"rank {world.rank} is the {world.local_rank + 1}. of its node, which shows it "
                f"{torch.cuda.device_count()} GPUs; each rank needs one. Ask for fewer ranks or more GPUs a node."
            )
        torch.cuda.set_device(world.local_rank)
    timeout = timedelta(seconds=timeout_s)
    client = TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_gpu else "gloo",
        store=PrefixStore(f"attempt-{attempt}/trainer", client),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )
