"""Which GPUs of one machine each process may see, and over what weights travel between them. Imports no torch."""

import os
import subprocess
from dataclasses import dataclass

from towline.storage.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    trainer: tuple[str, ...]
    """GPUs of the trainer's ranks, one a rank; empty on a machine without any."""
    engines: tuple[tuple[str, ...], ...]
    """GPUs of each engine."""

    @property
    def transfer_backend(self) -> str:
        """NCCL refuses two members on one GPU, so where a GPU is shared weights go through host memory."""
        used = [*self.trainer, *(gpu for engine in self.engines for gpu in engine)]
        return "nccl" if used and len(used) == len(set(used)) else "gloo"


def assign_gpus(gpus: tuple[str, ...], *, trainer_ranks: int, engines: int) -> Devices:
    """Give each rank and each engine a GPU of its own; a machine with too few has all engines share the last.

    Raises:
        InputError: fewer GPUs than trainer ranks.
    """
    if not gpus:
        return Devices(trainer=(), engines=((),) * engines)
    if trainer_ranks > len(gpus):
        raise InputError(
            f"local.trainer_ranks = {trainer_ranks} needs a GPU for each rank, {len(gpus)} can be seen "
            f"({', '.join(gpus)}). Set local.trainer_ranks = {len(gpus)}, or ask for more GPUs."
        )
    free = gpus[trainer_ranks:]
    own = free if len(free) >= engines else gpus[-1:] * engines
    return Devices(trainer=gpus[:trainer_ranks], engines=tuple((gpu,) for gpu in own[:engines]))


def visible_gpus() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES names, or else every GPU that the driver lists."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip() not in ("", "-1", "NoDevFiles"))
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except FileNotFoundError:
        return ()
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()


def visible(gpus: tuple[str, ...]) -> dict[str, str]:
    """The environment that shows a process these GPUs only; none where the machine has none."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
