"""What a checkpoint of this experiment at a step says of itself, beside weights and optimiser state."""

from functools import cache
from pathlib import Path

import torch.distributed as dist

from towline.jobs.experiment import DpoExperiment, ExperimentConfig, GrpoExperiment, IteratedDpoExperiment
from towline.storage.checkpoints import TrainingState, model_identity
from towline.trainer.config import EngineConfig

_MAY_CHANGE = {"batch_size", "beta", "pairs_per_prompt", "inner_epochs", "minibatches"}
"""What a resume may set anew; beta is told of where it stands for the KL's."""


def training_state(
    experiment: ExperimentConfig, data_hash: str, *, step: int, branch: int = 0, stream_digest: str = ""
) -> TrainingState:
    """
    Args:
        data_hash: of everything that says which prompts or examples a step holds.
    """
    trainer = experiment.trainer
    return TrainingState(
        step=step,
        wave=0,
        branch=branch,
        version=step,
        stream_digest=stream_digest,
        seed=experiment.seed,
        data=data_hash,
        reference=reference_identity(experiment, step),
        kl_beta=_kl_beta(experiment),
        ranks=dist.get_world_size(),
        zero_stage=trainer.zero_stage,
        precision=trainer.precision,
        optimizer={
            "adam_betas": list(trainer.adam_betas),
            "weight_decay": trainer.weight_decay,
            **_loss_settings(experiment),
        },
        lora="" if trainer.lora is None else trainer.lora.model_dump_json(),
    )


def reference_identity(experiment: ExperimentConfig, step: int) -> str:
    """Names what the reference of a step is computed from: a folder, the version it was refreshed to, int8 or not.

    Homes with the same numbers have the same name, so that a run may go on with another. Without a reference it names
    the model that the run began with.
    """
    folder = _identity(experiment.policy.folder)
    if not isinstance(experiment, GrpoExperiment | IteratedDpoExperiment):
        return folder
    version = experiment.trainer.last_refresh(step)
    is_int8 = experiment.policy.reference == "int8" and experiment.trainer.has_reference_model
    refreshed = "" if version is None else f", refreshed at step {version}"
    return folder + refreshed + (", int8" if is_int8 else "")


def _loss_settings(experiment: ExperimentConfig) -> dict[str, float | str]:
    """What else DPO, SFT and reward models say of their loss: another one would go on with the moments of this."""
    if isinstance(experiment, GrpoExperiment):
        return {}
    own = type(experiment.trainer).model_fields.keys() - EngineConfig.model_fields.keys() - _MAY_CHANGE
    return {name: getattr(experiment.trainer, name) for name in sorted(own)}


def _kl_beta(experiment: ExperimentConfig) -> float:
    """How strongly the policy is held to the reference."""
    match experiment:
        case GrpoExperiment():
            return experiment.trainer.kl_beta
        case DpoExperiment() | IteratedDpoExperiment():
            return experiment.trainer.beta
        case _:
            return 0.0


@cache
def _identity(folder: Path) -> str:
    """Reads a part of each file: once is enough."""
    return model_identity(folder)
