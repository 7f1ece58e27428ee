"""Adds up what a step's micro-batches measured, over ranks and inner steps. N = completion tokens of a micro-batch."""

import resource
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist


class StepMeter:
    """
    Call order: for each inner step `begin`, `add` for each micro-batch, with `add_first` in the first inner step, and
    `end`; then `summary`. Every rank must call `end` and `summary`.
    """

    _NAMES = ("tokens", "clipped", "kl_k3", "entropy", "loss", "first_tokens", "first_clipped", "k3", "k3_tokens")

    def __init__(self) -> None:
        self._sums = dict.fromkeys(self._NAMES, 0.0)
        self._max_abs = 0.0
        self._norms: list[float] = []
        self._losses: list[float] = []
        self._loss = 0.0
        self.last_loss = 0.0

    def begin(self) -> None:
        self._loss = 0.0

    def add(self, loss: torch.Tensor, sums: Mapping[str, torch.Tensor], entropy_N: torch.Tensor) -> None:
        self._loss += loss.item()
        for name in ("tokens", "clipped", "kl_k3"):
            self._sums[name] += float(sums.get(name, 0.0))
        self._sums["entropy"] += entropy_N.sum(dtype=torch.float64).item()

    def add_first(self, sums: Mapping[str, torch.Tensor], k3: torch.Tensor, max_abs: torch.Tensor, tokens: int) -> None:
        self._sums["first_tokens"] += float(sums.get("tokens", 0.0))
        self._sums["first_clipped"] += float(sums.get("clipped", 0.0))
        self._sums["k3"] += k3.item()
        self._sums["k3_tokens"] += tokens
        self._max_abs = max(self._max_abs, max_abs.item())

    def end(self, gradient_norm: float) -> None:
        # Each rank's loss is its share of the sum.
        total = torch.tensor([self._loss], dtype=torch.float64)
        dist.all_reduce(total)
        self.last_loss = total.item()
        self._losses.append(self.last_loss)
        self._norms.append(gradient_norm)

    def summary(
        self,
        *,
        learning_rate: float,
        trained_tokens: int,
        fill: float,
        padding_saved: float,
        imbalance: float,
        staleness: int,
    ) -> dict[str, float]:
        sums = torch.tensor([self._sums[name] for name in self._NAMES], dtype=torch.float64)
        largest = torch.tensor([self._max_abs, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20])
        dist.all_reduce(sums)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        total = dict(zip(self._NAMES, sums.tolist(), strict=True))
        nan = float("nan")
        per_token = {name: total[name] / total["tokens"] if total["tokens"] else nan for name in self._NAMES}
        return {
            "loss/policy": float(np.mean(self._losses)),
            "loss/kl": per_token["kl_k3"],
            "loss/clipped": per_token["clipped"],
            "loss/clipped_first": total["first_clipped"] / total["first_tokens"] if total["first_tokens"] else nan,
            "loss/entropy": per_token["entropy"],
            "loss/gradient_norm": float(np.mean(self._norms)),
            "loss/learning_rate": learning_rate,
            "mismatch/k3": total["k3"] / total["k3_tokens"] if total["k3_tokens"] else nan,
            "mismatch/max_abs_logprob": largest[0].item() if total["k3_tokens"] else nan,
            "tokens/loss": total["tokens"] / len(self._losses),
            "tokens/trained": trained_tokens,
            "tokens/fill": fill,
            "tokens/padding_saved": padding_saved,
            "tokens/imbalance": imbalance,
            "staleness/max": staleness,
            "memory/trainer_gib": largest[1].item(),
        }
