"""Weights that visit the device. A copy in other memory of this machine stands in for the device."""

import gc
import weakref

import pytest
import torch
from torch import nn

from towline.trainer.offload import OffloadedWeights

CPU = torch.device("cpu")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, input_BD):
        return self.second(self.first(input_BD))


def test_weights_are_copies_inside_and_at_home_outside():
    module = Tied().requires_grad_(False)
    home, input_BD = module.first.weight.data, torch.ones(2, 4)
    before_BD = module(input_BD)
    copies = []

    def fetch(weight):
        copy = weight.clone()
        copies.append(weakref.ref(copy.untyped_storage()))
        return copy

    offloaded = OffloadedWeights(module, CPU, fetch)
    with offloaded.on_device():
        assert module.first.weight.data_ptr() == module.second.weight.data_ptr() != home.data_ptr()
        assert torch.equal(module(input_BD), before_BD)
    assert module.first.weight.data_ptr() == module.second.weight.data_ptr() == home.data_ptr()
    gc.collect()
    assert [copy() for copy in copies] == [None]


def test_weights_go_home_when_computing_or_fetching_fails():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    homes = [parameter.data_ptr() for parameter in module.parameters()]
    with pytest.raises(ZeroDivisionError), OffloadedWeights(module, CPU, torch.clone).on_device():
        raise ZeroDivisionError
    assert [parameter.data_ptr() for parameter in module.parameters()] == homes

    weights = iter(range(2))

    def full_after_two(weight):
        if next(weights, None) is None:
            raise torch.OutOfMemoryError
        return weight.clone()

    with pytest.raises(torch.OutOfMemoryError), OffloadedWeights(module, CPU, full_after_two).on_device():
        pass
    assert [parameter.data_ptr() for parameter in module.parameters()] == homes


def test_without_a_gpu_nothing_is_copied():
    module = nn.Linear(4, 4)
    home = module.weight.data_ptr()
    offloaded = OffloadedWeights(module, CPU)
    assert module.weight.data_ptr() == home
    with offloaded.on_device():
        assert module.weight.data_ptr() == home
