"""How many processes score: one, or with --mpi all ranks of a launch.

Rank 0 does all that the command does. The others make the pools that it asks for, score what it hands out, say nothing,
and end with its exit code.
"""

import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from towline.jobs.launched import launched_rank, num_launched
from towline.launcher.carry_out import carry_out
from towline.rollout.grading import MakeScorer, one_pool
from towline.rollout.scoring import ScoringPool
from towline.storage.errors import ConfigError, TowlineError

if TYPE_CHECKING:
    from mpi4py import MPI

    from towline.rollout.scorer_group import ScorerGroup

Work = Callable[[MakeScorer], int]
"""Scores with what the given function makes, and returns the exit code."""
MakePool = Callable[[], ScoringPool]
POLL_S = 0.02


def alone(work: Work) -> int:
    """
    Raises:
        ConfigError: several tasks were started, each of which would do everything; on the first of them.
    """
    if (num := num_launched()) > 1:
        return _refuse(
            ConfigError(
                f"{num} tasks of `towline score` were started, and each would score everything: add --mpi, so that "
                "they share the work, or start one task."
            )
        )
    return work(one_pool)


def over_ranks(work: Work) -> int:
    """
    Raises:
        ConfigError: there is no MPI, or it does not fit what started the tasks; on the first of them.
    """
    try:
        world = _world()
    except ConfigError as error:
        return _refuse(error)
    try:
        return _lead(world, work) if world.rank == 0 else _follow(world)
    except BaseException:  # of our own making: who leaves by himself lets the others wait for ever
        traceback.print_exc()
        sys.stderr.flush()
        world.Abort(1)
        raise


def _refuse(error: ConfigError) -> int:
    """All tasks come to the same, and one of them says it."""
    if launched_rank() == 0:
        raise error
    return error.exit_code


def _world() -> "MPI.Intracomm":
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # the latter where it finds no MPI library
        raise ConfigError(
            f"--mpi needs mpi4py and an MPI library ({error}). bash env/setup.sh installs both; without --mpi one "
            "process scores."
        ) from error
    world, num = MPI.COMM_WORLD, num_launched()
    if world.size < num:
        raise ConfigError(
            f"MPI: {num} tasks were started, but each sees a world of {world.size} and would score everything. The "
            "launcher and the MPI library do not fit together: use the mpirun of that library, or with Slurm "
            "srun --mpi=TYPE, one of `srun --mpi=list`."
        )
    return world


def _lead(world: "MPI.Intracomm", work: Work) -> int:
    def make_group(make_pool: MakePool) -> "ScorerGroup":
        _said(world, make_pool)
        return _group(world, make_pool)

    code = carry_out(lambda: work(make_group))
    _said(world, code)
    return code


def _follow(world: "MPI.Intracomm") -> int:
    while not isinstance(said := _said(world), int):
        # Rank 0 is told of every error, and tells it.
        with suppress(TowlineError), _group(world, said) as group:
            group.serve()
    return said


def _group(world: "MPI.Intracomm", make_pool: MakePool) -> "ScorerGroup":
    from towline.rollout.scorer_group import ScorerGroup

    return ScorerGroup(world, make_pool)


def _said(world: "MPI.Intracomm", what: MakePool | int = 0) -> MakePool | int:
    """What rank 0 says: a pool to make, or the exit code. Reading a large file takes a while, and MPI's own waits would
    take a core each."""
    together = world.Ibarrier()
    while not together.Test():
        time.sleep(POLL_S)
    return world.bcast(what)
