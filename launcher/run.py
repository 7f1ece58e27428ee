"""`towline run`: look at everything, make the run folder, supervise, and say what came of it."""

import contextlib
import os
import shutil
import time
from datetime import datetime
from pathlib import Path

from rich.console import Console

from towline.jobs.experiment import ExperimentConfig, RolloutExperiment
from towline.jobs.supervisor import Outcome, supervise
from towline.launcher.environment import describe_environment
from towline.launcher.example_outcome import draw_loss_curve
from towline.launcher.experiment_file import ExperimentFile, read_experiment
from towline.launcher.preflight import machine_problems, preflight, raise_problems
from towline.launcher.progress import RunProgress
from towline.launcher.report import draw_reward_curve
from towline.launcher.several_runs import print_comparison, runs_of
from towline.launcher.summary import summary_lines
from towline.rollout.rewards.formula import formula
from towline.storage.dataset_files import shown
from towline.storage.errors import InputError, RunFault
from towline.storage.run_directory import RunDirectory, write_json

STOPPED = 3


def run_experiment(path: Path, overrides: tuple[str, ...]) -> int:
    """Carry out one run on this machine, or one after the other where the file is several.

    Raises:
        InputError: something is wrong that could be known; nothing was made or started.
        RunFault: a process of the run failed.
    """
    refuse_login_node(path)
    console = Console(highlight=False)
    file, experiment = read_experiment(path, overrides)
    experiment = experiment.model_copy(update={"nodes": None})
    found = preflight(file, experiment)
    raise_problems([*found.problems, *machine_problems(experiment)])
    for warning in found.warnings:
        _say(console, f"! {warning}")
    runs = runs_of(path, experiment)
    for one in runs:
        if code := carry_out(make_run(file, one), one, console):
            return code
    if len(runs) > 1:
        print_comparison(console, runs)
    return 0


def carry_out(run: RunDirectory, experiment: ExperimentConfig, console: Console) -> int:
    """One attempt of a run, shown on the console from its beginning to the summary; return the exit code."""
    _say(console, f"run {run.root.name}   folder {shown(run.root)}")
    if isinstance(experiment, RolloutExperiment):
        _say(console, f"reward {formula(experiment.rewards)}")
    began = time.monotonic()
    try:
        with RunProgress(console, experiment.steps) as progress:
            outcome = supervise(run, experiment, progress)
    except RunFault:
        with contextlib.suppress(OSError):  # no space left: the fault itself is what must be read
            _draw(run, experiment)
        raise
    _draw(run, experiment)
    for line in summary_lines(run, experiment, time.monotonic() - began):
        _say(console, line)
    return _exit_code(outcome, run, console)


def _draw(run: RunDirectory, experiment: ExperimentConfig) -> None:
    if isinstance(experiment, RolloutExperiment):
        draw_reward_curve(run)
    else:
        draw_loss_curve(run)


def refuse_login_node(what: Path, *, verb: str = "run") -> None:
    """A login node is shared by everybody; training on it is unkind and usually killed."""
    if shutil.which("sbatch") is None or "SLURM_JOB_ID" in os.environ or os.environ.get("TOWLINE_ALLOW_LOGIN") == "1":
        return
    alone = f"sbatch --nodes=1 --exclusive --wrap 'towline {verb} {what}'"
    use = (
        f"  towline submit {what}{'' if os.environ.get('TOWLINE_CLUSTER') else ' --cluster PROFILE'}\n"
        f"or, for one node and with your partition and account,\n  {alone}\n"
        if verb == "run"
        else f"  {alone}\nwith your partition and account. "
    )
    raise InputError(
        f"towline {verb} trains on this machine, and this is a login node of a Slurm cluster (sbatch is on the PATH, "
        f"and there is no allocation). Use\n{use}TOWLINE_ALLOW_LOGIN=1 runs it here all the same."
    )


def make_run(file: ExperimentFile, experiment: ExperimentConfig) -> RunDirectory:
    """Make the run folder with the resolved experiment, the file as written, and the environment."""
    run = RunDirectory.create(_run_folder(file, experiment))
    named = experiment.model_copy(update={"run": experiment.run.model_copy(update={"name": run.root.name})})
    run.source_config.write_text(file.text, encoding="utf-8")
    write_json(run.environment, describe_environment(file.overrides))
    # Written last: a folder with it is a run.
    write_json(run.config, named.model_dump(mode="json"))
    return run


def _run_folder(file: ExperimentFile, experiment: ExperimentConfig) -> Path:
    root = experiment.run.root
    if experiment.run.name is not None:
        return root / experiment.run.name
    name = f"{file.path.stem}-{datetime.now():%m%d-%H%M%S}"
    names = (name, *(f"{name}-{number}" for number in range(2, 100)))
    return next(root / name for name in names if not (root / name).exists())


def _exit_code(outcome: Outcome, run: RunDirectory, console: Console) -> int:
    if outcome.status == "done":
        return 0
    step = outcome.next_step
    _say(console, f"stopped at step {step} with checkpoint {step} kept")
    _say(console, f"next      towline resume {shown(run.root)}")
    return STOPPED


def _say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False)
