"""What a checkpoint of this experiment at a step says of itself, beside weights and optimiser state."""

from functools import cache
from pathlib import Path

import torch.distributed as dist

from towline.jobs.experiment import ExperimentConfig
from towline.jobs.work import Workload
from towline.storage.checkpoints import TrainingState, model_identity


def training_state(
    experiment: ExperimentConfig, work: Workload, *, step: int, branch: int = 0, stream_digest: str = ""
) -> TrainingState:
    trainer = experiment.trainer
    return TrainingState(
        step=step,
        wave=0,
        branch=branch,
        version=step,
        stream_digest=stream_digest,
        seed=experiment.seed,
        data=work.data_hash,
        reference=reference_identity(experiment, step),
        kl_beta=trainer.kl_beta,
        ranks=dist.get_world_size(),
        zero_stage=trainer.zero_stage,
        precision=trainer.precision,
        optimizer={"adam_betas": list(trainer.adam_betas), "weight_decay": trainer.weight_decay},
        lora="" if trainer.lora is None else trainer.lora.model_dump_json(),
    )


def reference_identity(experiment: ExperimentConfig, step: int) -> str:
    """Names what the reference of a step is computed from: a folder, the version it was refreshed to, int8 or not.

    Homes with the same numbers have the same name, so that a run may go on with another.
    """
    trainer = experiment.trainer
    version = trainer.last_refresh(step)
    is_int8 = experiment.policy.reference == "int8" and trainer.kl_beta > 0
    refreshed = "" if version is None else f", refreshed at step {version}"
    return _identity(experiment.model_folder) + refreshed + (", int8" if is_int8 else "")


@cache
def _identity(folder: Path) -> str:
    """Reads a part of each file: once is enough."""
    return model_identity(folder)
