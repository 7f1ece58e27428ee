"""Every process of a machine sees the GPUs that are its own, and weights take a way that exists."""

import pytest

from towline.jobs.devices import assign_gpus, visible, visible_gpus
from towline.storage.errors import InputError


def test_ranks_and_engines_get_a_gpu_each_and_weights_go_over_nccl():
    devices = assign_gpus(("0", "1", "2", "3", "4"), trainer_ranks=2, engines=2)
    assert (devices.trainer, devices.engines) == (("0", "1"), (("2",), ("3",)))
    assert devices.transfer_backend == "nccl"


def test_a_single_gpu_is_shared_and_weights_go_through_the_host():
    devices = assign_gpus(("0",), trainer_ranks=1, engines=1)
    assert (devices.trainer, devices.engines) == (("0",), (("0",),))
    assert devices.transfer_backend == "gloo"


def test_engines_that_find_no_gpu_of_their_own_share_the_last():
    devices = assign_gpus(("0", "1", "2"), trainer_ranks=2, engines=2)
    assert devices.engines == (("2",), ("2",))
    assert devices.transfer_backend == "gloo"


def test_a_machine_without_gpus_hides_nothing_and_uses_gloo():
    devices = assign_gpus((), trainer_ranks=2, engines=2)
    assert (devices.trainer, devices.engines, devices.transfer_backend) == ((), ((), ()), "gloo")
    assert visible(devices.trainer) == {}


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(InputError, match=r"local.trainer_ranks = 4 needs a GPU for each rank, 2 can be seen"):
        assign_gpus(("0", "1"), trainer_ranks=4, engines=1)


@pytest.mark.parametrize(
    ("value", "gpus"), [("2,3", ("2", "3")), ("", ()), ("-1", ()), ("GPU-8a1b, GPU-77cc", ("GPU-8a1b", "GPU-77cc"))]
)
def test_the_allocation_says_which_gpus_are_ours(monkeypatch, value, gpus):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert visible_gpus() == gpus
    if gpus:
        assert visible(gpus)["CUDA_VISIBLE_DEVICES"].split(",") == list(gpus)


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert visible_gpus() == ()
