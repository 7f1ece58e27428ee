"""Run a submitted callable inside its job, as `batch_entry` was told to.

Without a component this is the batch step of the job, one process; with it, a rank of that component's step.
Imports no torch.
"""

import argparse
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

from submitit.core.submission import process_job

from towline.jobs.slurm.environment import HetSlurmJobEnvironment, activate
from towline.jobs.slurm.submission import Submission, give_to_job
from towline.storage.errors import TowlineError
from towline.storage.publish import replace_whole


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="towline.jobs.slurm.batch_entry", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("folder", type=Path, help="of the executor")
    parser.add_argument("name", nargs="?", default="callable", help="of the submission: NAME.pkl and NAME.json")
    parser.add_argument("component", nargs="?", type=int)
    parsed = parser.parse_args(arguments)
    folder = parsed.folder.absolute()
    environment = activate(folder, parsed.name, parsed.component)
    try:
        prepare(environment, folder, parsed.name)
    except TowlineError as error:
        return report(error, environment)
    try:
        process_job(folder)
    except TowlineError as error:  # its traceback is where the result would be; the log has what a person needs
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def prepare(environment: HetSlurmJobEnvironment, folder: Path, name: str) -> None:
    """Check what can be checked before unpickling, and put the callable where submitit reads that of this job."""
    # A rank that ended while an earlier start was being stopped has left a result that would be taken for this one's.
    environment.paths.result_pickle.unlink(missing_ok=True)
    component = environment.component
    source = folder / (f"{name}.pkl" if component is None else f"{name}+{component}.pkl")
    Submission.read(folder / f"{name}.json").check_python(source)
    first = environment.num_restarts == 0 and environment.global_rank == 0
    give_to_job(source, environment.paths.submitted_pickle, replace=first)


def report(error: TowlineError, environment: HetSlurmJobEnvironment) -> int:
    """To the log, and to whoever waits for the result."""
    print(f"error: {error}", file=sys.stderr)
    with replace_whole(environment.paths.result_pickle) as temporary:
        temporary.write_bytes(pickle.dumps(("error", f"{type(error).__name__}: {error}")))
    return error.exit_code
