"""Verbs that are about rollouts, and runs that have none."""

from towline.jobs.experiment import ExperimentConfig, RolloutExperiment
from towline.jobs.load_experiment import recorded_experiment
from towline.storage.errors import InputError
from towline.storage.run_directory import RunDirectory


def rollout_experiment(run: RunDirectory, verb: str) -> RolloutExperiment:
    """The experiment of a run that generates.

    Raises:
        InputError: it learns from given examples.
    """
    return with_rollouts(recorded_experiment(run.config.read_text()), run.root.name, verb)


def with_rollouts(experiment: ExperimentConfig, name: str, verb: str) -> RolloutExperiment:
    if isinstance(experiment, RolloutExperiment):
        return experiment
    raise InputError(
        f'{name} has objective = "{experiment.objective}", which learns from given examples and generates nothing; '
        f"towline {verb} is about rollouts and their rewards."
    )
