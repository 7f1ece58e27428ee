"""Weights that live in main memory and visit the device."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn


class OffloadedWeights:
    """Keeps the weights of a frozen module in main memory; the module computes only inside `on_device`.

    Pinned where there is a GPU: copies to it then run at the speed of the bus. torch hands out pinned memory in powers
    of two, so that it can take up to twice the weights. Without a GPU the weights stay where they are.

    Args:
        fetch: copies a weight to where the module computes; by default to `device`.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, fetch: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._fetch = fetch or (lambda home: home.to(device, non_blocking=True))
        # A tied weight is one parameter, and is moved once.
        self._parameters = list(module.parameters())
        for parameter in self._parameters:
            home = parameter.data.to("cpu")
            parameter.data = home.pin_memory() if device.type == "cuda" else home

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Inside the block the weights are on the device; after it, also after an error, those copies are given up."""
        homes = [parameter.data for parameter in self._parameters]
        try:
            for parameter, home in zip(self._parameters, homes, strict=True):
                parameter.data = self._fetch(home)
            yield
        finally:
            for parameter, home in zip(self._parameters, homes, strict=True):
                parameter.data = home
