"""An experiment file that is several runs, one after the other: which they are, and how they compare at the end."""

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from towline.jobs.experiment import DpoExperiment, ExperimentConfig
from towline.launcher.sweep import sweep_lines, sweep_runs
from towline.storage.errors import InputError
from towline.trainer.supervised_config import SweepConfig


def runs_of(path: Path, experiment: ExperimentConfig) -> Sequence[ExperimentConfig]:
    """Several have a name each; one alone is the experiment as it is."""
    base = experiment.run.name or f"{path.stem}-{time.strftime('%m%d-%H%M%S')}"
    match experiment:
        case DpoExperiment(sweep=SweepConfig(beta=beta)):
            return sweep_runs(experiment, beta, base)
        case _:
            return [experiment]


def refuse_several(path: Path, experiment: ExperimentConfig, why: str) -> None:
    """
    Args:
        why: what needs an experiment of one run, as the middle of a sentence.
    """
    if (num_runs := len(runs_of(path, experiment))) == 1:
        return
    one = "Add -o trainer.beta=VALUE and take [sweep] out."
    raise InputError(f"{path} is {num_runs} runs, which is a job each: {why}. {one}")


def print_comparison(console: Console, runs: Sequence[ExperimentConfig]) -> None:
    """
    Args:
        runs: several of one file, which are done.
    """
    console.print()
    for line in sweep_lines([one for one in runs if isinstance(one, DpoExperiment)]):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
