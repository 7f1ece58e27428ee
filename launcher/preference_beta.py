"""Whether DPO's beta is one that usually teaches something."""

from collections.abc import Iterator

from towline.jobs.experiment import DpoExperiment, IteratedDpoExperiment
from towline.launcher.experiment_file import ExperimentFile

BETA_RANGE = (0.05, 0.5)
"""Where it is usually of use."""


def beta_warnings(file: ExperimentFile, experiment: DpoExperiment | IteratedDpoExperiment) -> Iterator[str]:
    low, high = BETA_RANGE
    sweep = experiment.sweep if isinstance(experiment, DpoExperiment) else None
    key, betas = ("trainer.beta", (experiment.trainer.beta,)) if sweep is None else ("sweep.beta", sweep.beta)
    for beta in betas:
        if not low <= beta <= high:
            why = (
                "so small a beta hardly holds the policy to the reference, and it forgets what the pairs do not show"
                if beta < low
                else "so large a beta holds the policy at the reference, and little is learned"
            )
            yield f"{file.where(key)}: {key} = {beta:g} is outside {low} to {high}: {why}"
