"""Sums and largest values over the ranks of what each measured."""

import torch
import torch.distributed as dist


def rank_sums(sums: dict[str, float]) -> dict[str, float]:
    """The same names on every rank, in one order; every rank must call it."""
    total = torch.tensor(list(sums.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(sums, total.tolist(), strict=True))


def rank_largest(value: float) -> float:
    """Every rank must call it."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()
