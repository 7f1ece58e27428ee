"""What the executor leaves on disk for a job to find: the pickled callable, and what must be known before it is read.

    FOLDER/callable.sh        the text for sbatch
    FOLDER/callable.pkl       the callable: DelayedSubmission of submitit
    FOLDER/callable.json      Submission: versions, time limit, signal
    FOLDER/12_submitted.pkl   the callable of job 12, replaced at a checkpoint
    FOLDER/12_0_result.pkl    what rank 0 returned, or its traceback
    FOLDER/12+1_...           the same of a component of its own

None of the first three knows a job id, so a person may type `sbatch FOLDER/callable.sh` as well.
"""

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from towline.storage.errors import InputError
from towline.storage.publish import publish_first, replace_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    python: str
    """Version, such as 3.11.2."""
    submitit: str
    time: str | None
    """`--time` as the leader's options have it; None if the partition's own limit holds."""
    signal: str | None
    """`--signal` of the leader, such as B:USR2@110."""

    @classmethod
    def of(cls, *, time: str | None, signal: str | None) -> "Submission":
        """With the versions of this process."""
        return cls(python=python_version(), submitit=version("submitit"), time=time, signal=signal)

    def write(self, path: Path) -> None:
        with replace_whole(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "Submission":
        """
        Raises:
            InputError: the file is missing or another program's.
        """
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"{path}: {error}. Expected what the executor writes beside the script. Submit again, and keep the "
                "files of a submission together in a folder that every node sees."
            ) from error

    def check_python(self, pickle: Path) -> None:
        """Before unpickling: code of another minor version fails there with words that help nobody.

        Raises:
            InputError: names both versions.
        """
        if _minor(self.python) != _minor(python_version()):
            raise InputError(
                f"{pickle} was written by Python {self.python}, but this node runs Python {python_version()} "
                f"({sys.executable}): a pickled function needs the same minor version. "
                "Give the executor `python=` of the same version, visible on the nodes."
            )


def first_free_name(folder: Path) -> str:
    """`callable`, or `callable-2`, ... for a later submission in the same folder, claimed for this process."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        name = "callable" if number == 1 else f"callable-{number}"
        try:
            os.close(os.open(folder / f"{name}.pkl", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return name
        except FileExistsError:
            number += 1


def give_to_job(source: Path, submitted: Path, *, replace: bool = False) -> None:
    """Copy the callable to the path of the job, whole, unless it is there: a checkpoint of an earlier start is newer.

    Args:
        replace: what is there is of another job that once had this id.
    """
    if replace:
        with replace_whole(submitted) as temporary:
            shutil.copyfile(source, temporary)
    elif not submitted.exists():
        try:
            with publish_first(submitted) as temporary:
                shutil.copyfile(source, temporary)
        except FileExistsError:
            return


def python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def _minor(python: str) -> list[str]:
    return python.split(".")[:2]
