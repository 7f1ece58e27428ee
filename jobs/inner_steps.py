"""What an objective on rollouts does with a step's scored groups."""

from collections.abc import Callable
from functools import partial

from towline.jobs.experiment import GrpoExperiment, IteratedDpoExperiment, RolloutExperiment
from towline.trainer import grpo, iterated_dpo
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.policy import Policy
from towline.trainer.reference import Reference
from towline.trainer.rollout_steps import InnerSteps


def training_temperature(experiment: RolloutExperiment) -> float:
    """Of the log-probs that the loss is made of: GRPO's ratio is of what was sampled."""
    match experiment:
        case GrpoExperiment():
            return experiment.rollout.temperature
        case IteratedDpoExperiment():
            return iterated_dpo.TRAINING_TEMPERATURE


def inner_steps(
    experiment: RolloutExperiment,
    engine: DeepSpeedEngine[Policy],
    reference: Reference | None,
    *,
    on_progress: Callable[[str], None],
) -> InnerSteps:
    match experiment:
        case GrpoExperiment():
            return partial(
                grpo.take_inner_steps,
                engine,
                reference,
                experiment.trainer,
                seed=experiment.seed,
                max_completion_tokens=experiment.rollout.max_completion_tokens,
                on_progress=on_progress,
            )
        case IteratedDpoExperiment():
            return partial(
                iterated_dpo.take_inner_steps,
                engine,
                reference,
                experiment.trainer,
                seed=experiment.seed,
                sampling_temperature=experiment.rollout.temperature,
                on_progress=on_progress,
            )
