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
        reference=_identity(experiment.model_folder),
        kl_beta=trainer.kl_beta,
        ranks=dist.get_world_size(),
        zero_stage=trainer.zero_stage,
        precision=trainer.precision,
        optimizer={"adam_betas": list(trainer.adam_betas), "weight_decay": trainer.weight_decay},
    )


@cache
def _identity(folder: Path) -> str:
    """Reads a part of each file: once is enough."""
    return model_identity(folder)
