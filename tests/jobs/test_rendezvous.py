"""Who a rank is and where the ranks meet, whatever the launcher says."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from towline.jobs.control_store import ControlStore
from towline.jobs.rendezvous import World, find_world, join_trainer_group
from towline.storage.errors import TowlineError

UNDER_SRUN = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "TOWLINE_NUM_TASKS": "4"}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in os.environ if name.startswith(("OMPI_", "PMI", "SLURM_", "MPI_", "TOWLINE_"))]:
        monkeypatch.delenv(name)

    def set_variables(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch):
    """What MPI answers, without MPI."""

    def set_answer(rank: int, size: int) -> None:
        module = ModuleType("mpi4py")
        module.MPI = SimpleNamespace(COMM_WORLD=SimpleNamespace(rank=rank, size=size))  # pyright: ignore
        monkeypatch.setitem(sys.modules, "mpi4py", module)

    return set_answer


# case G4-25
@pytest.mark.parametrize("kind", ["pmix", "pmi2"])
@pytest.mark.parametrize("size", [1, 2])
def test_an_mpi_that_sees_fewer_ranks_than_were_started_is_refused(variables, mpi, kind: str, size: int):
    variables(**UNDER_SRUN, TOWLINE_MPI=kind)
    mpi(0, size)
    message = (
        f"MPI: 4 tasks were started, but each sees a world of {size}.*set mpi in the profile to one of "
        "`srun --mpi=list`, as a rule pmix or pmi2, or to none"
    )
    with pytest.raises(TowlineError, match=message):
        find_world()


@pytest.mark.parametrize(
    "launched",
    [
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {},
    ],
    ids=["srun", "mpirun", "hydra", "nobody"],
)
def test_without_mpi_too_one_of_one_is_refused_where_four_were_started(variables, launched: dict[str, str]):
    # case G4-25
    variables(TOWLINE_NUM_TASKS="4", TOWLINE_MPI="none", **launched)
    with pytest.raises(TowlineError, match="4 tasks were started, but each sees a world of 1"):
        find_world()


def test_mpi_says_which_rank_this_is_and_slurm_which_of_its_node(variables, mpi):
    # case G4-04: ranks are MPI's, in whatever order Slurm gave nodes to them
    variables(**UNDER_SRUN, TOWLINE_MPI="pmix")
    mpi(0, 4)
    assert find_world() == World(rank=0, size=4, local_rank=1)


def test_without_mpi_slurms_variables_say_it(variables):
    variables(**UNDER_SRUN, TOWLINE_MPI="none")
    assert find_world() == World(rank=3, size=4, local_rank=1)


def test_rank_0_meets_the_others_at_the_store_and_serves_nothing(variables, monkeypatch: pytest.MonkeyPatch):
    # case G4-04: its host may be any of the list
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "of another launcher")
    variables(SLURM_JOB_NODELIST="n[1-2]", SLURMD_NODENAME="n2")
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = ControlStore(f"127.0.0.1:{server.port}", b"key", 0)
    if dist.is_initialized():  # by a test before
        dist.destroy_process_group()
    join_trainer_group(store, World(rank=0, size=1, local_rank=0), attempt=0, timeout_s=20)
    try:
        assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", str(server.port))
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    finally:
        dist.destroy_process_group()
