"""A chunk that is given up is sealed without a group: every reader sees the same, and a replay too."""

import contextlib
import time

from towline.jobs.leases import Store
from towline.storage.ledger import read_shard, seal_shard
from towline.storage.records import ChunkId, ShardOrigin
from towline.storage.run_directory import RunDirectory


def give_up(run: RunDirectory, store: Store, lease: str, attempt: int) -> None:
    """Seal nothing under the name of the chunk that `lease` stands for, and announce it."""
    _, work, chunk = lease.split("/", 2)
    path = run.root / work / f"{chunk}.h5"
    now = time.time()
    step, wave, number = (int(part.rpartition("-")[2]) for part in chunk.split("/"))
    origin = ShardOrigin(
        chunk=ChunkId(step=step, wave=wave, chunk=number),
        branch=0,
        engine=-1,
        attempt=attempt,
        weight_hashes={},
        sampling={},
        began=now,
        ended=now,
    )
    with contextlib.suppress(FileExistsError):  # sealed by an engine in its last moment
        seal_shard(path, (), origin)
    store.set(f"{work}/sealed/{chunk}", read_shard(path).digest)
