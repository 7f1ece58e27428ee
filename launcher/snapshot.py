"""What a queued job runs is what was there when it was submitted, whatever is edited meanwhile."""

import compileall
import os
import shutil
from pathlib import Path

import towline
from towline.jobs.experiment import ExperimentConfig, RolloutExperiment
from towline.storage.run_directory import RunDirectory

ROOMS = ("launcher", "jobs", "trainer", "rollout", "storage")
MAX_NEIGHBOUR_BYTES = 2**20
"""A reward may read a list of words that lies beside it; what is larger is data."""
_NO_CACHE = shutil.ignore_patterns("__pycache__")


def take_snapshot(run: RunDirectory, experiment: ExperimentConfig) -> ExperimentConfig:
    """Copy Towline and the user's own rewards into the run; return the experiment with the copies in their place."""
    package = run.code / "towline"
    source = Path(towline.__file__).parent
    for room in ROOMS:
        shutil.copytree(source / room, package / room, ignore=_NO_CACHE)
    for file in ("__init__.py", "py.typed"):
        shutil.copyfile(source / file, package / file)
    # Every process would compile it otherwise, and the folder may not be writable by then.
    compileall.compile_dir(package, quiet=2)
    if not isinstance(experiment, RolloutExperiment):
        return experiment
    # The part keeps its name, which follows from the names of file and function.
    rewards = tuple(
        reward.model_copy(update={"use": _copy_reward(run, number, reward.use)})
        for number, reward in enumerate(experiment.rewards)
    )
    return experiment.model_copy(update={"rewards": rewards})


def _copy_reward(run: RunDirectory, number: int, use: str) -> str:
    """A file of the user's with what lies beside it, for it may import or read that."""
    file, colon, function = use.rpartition(":")
    if not colon:
        return use
    copy = run.code / "rewards" / str(number)
    copy.mkdir(parents=True)
    for neighbour in sorted(Path(file).parent.iterdir()):
        if (neighbour / "__init__.py").is_file():
            shutil.copytree(neighbour, copy / neighbour.name, ignore=_NO_CACHE, ignore_dangling_symlinks=True)
        elif _is_wanted(neighbour):
            shutil.copyfile(neighbour, copy / neighbour.name)
    return f"{copy / Path(file).name}:{function}"


def _is_wanted(path: Path) -> bool:
    if path.name.startswith(".") or not path.is_file() or not os.access(path, os.R_OK):
        return False
    return path.suffix == ".py" or path.stat().st_size <= MAX_NEIGHBOUR_BYTES
