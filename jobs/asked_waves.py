"""Which waves of a step engines and scorers serve: wave 0, and those that the trainer's first rank has asked for.

    {work}/waves/{step}    how many waves are asked for, where that is more than one

It belongs to an attempt, like all control state: the next one comes to the same waves by looking at the same groups.
Imports no torch.
"""

from towline.jobs.leases import Store
from towline.jobs.work import Workload
from towline.storage.records import ChunkId


def ask_for_waves(store: Store, work: Workload, step: int, num_waves: int) -> None:
    store.set(f"{work.name}/waves/{step}", num_waves)


def asked_chunks(store: Store, work: Workload, step: int) -> list[tuple[ChunkId, tuple[int, ...]]]:
    """The step's chunks so far in canonical order, by wave, each with its dataset rows."""
    asked = store.get(f"{work.name}/waves/{step}") if work.max_waves > 1 else None
    return [chunk for wave in range(asked or 1) for chunk in work.chunks(step, wave)]
