"""How much memory the ranks have taken."""

import resource

import torch
import torch.distributed as dist


def peak_gib() -> float:
    """Largest resident memory of a rank so far, GiB. Every rank must call it."""
    largest = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()
