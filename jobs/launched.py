"""What mpirun or srun says of the tasks that it started. Nobody asks MPI here: it may not be there, or not fit."""

import os

RANK_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
)
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""SLURM_NTASKS is there in a batch script too, which is one process however many tasks its job may start."""


def launched_rank() -> int:
    """The number that our launcher gave this task, before anybody asked MPI: it names log and fault."""
    names = [rank for rank, _, _ in RANK_VARIABLES if rank in os.environ]
    return int(os.environ[names[0]]) if names else 0


def num_launched() -> int:
    """How many tasks were started together, this one included; 1 where nobody says so."""
    names = [size for size in _SIZE_VARIABLES if size in os.environ]
    return int(os.environ[names[0]]) if names else 1
