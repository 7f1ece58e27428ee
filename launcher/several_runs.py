"""An experiment file that is several runs, one after the other: which they are, and how they compare at the end."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from towline.jobs.experiment import DpoExperiment, ExperimentConfig, RewardModelExperiment
from towline.launcher.sweep import sweep_lines, sweep_runs
from towline.launcher.watcher import watched_runs, watcher_lines
from towline.storage.errors import InputError
from towline.trainer.supervised_config import SweepConfig


def runs_of(path: Path, experiment: ExperimentConfig) -> Sequence[ExperimentConfig]:
    """Several have a name each; one alone is the experiment as it is."""
    base = experiment.run.name or f"{path.stem}-{time.strftime('%m%d-%H%M%S')}"
    match experiment:
        case DpoExperiment(sweep=SweepConfig(beta=beta)):
            return sweep_runs(experiment, beta, base)
        case RewardModelExperiment(watcher=True):
            return watched_runs(experiment, base)
        case _:
            return [experiment]


def refuse_several(path: Path, experiment: ExperimentConfig, why: str) -> None:
    """
    Args:
        why: what needs an experiment of one run, as the middle of a sentence.
    """
    if (num_runs := len(runs_of(path, experiment))) == 1:
        return
    one = (
        "Add -o trainer.beta=VALUE and take [sweep] out."
        if isinstance(experiment, DpoExperiment)
        else f"Add -o watcher=false -o data.half=first -o data.half_seed={experiment.seed} for the first."
    )
    raise InputError(f"{path} is {num_runs} runs, which is a job each: {why}. {one}")


def print_comparison(console: Console, runs: Sequence[ExperimentConfig]) -> None:
    """
    Args:
        runs: several of one file, which are done.
    """
    console.print()
    for line in _comparison_lines(runs):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _comparison_lines(runs: Sequence[ExperimentConfig]) -> Iterator[str]:
    if values := [one for one in runs if isinstance(one, DpoExperiment)]:
        yield from sweep_lines(values)
    if models := [one for one in runs if isinstance(one, RewardModelExperiment)]:
        yield from watcher_lines(models)
