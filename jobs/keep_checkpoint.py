"""Write a checkpoint from within a run, and let the supervisor know how long it took."""

import time

import torch.distributed as dist

from towline.jobs.role import Role
from towline.storage.checkpoints import TrainingState
from towline.trainer.checkpoint import save_checkpoint
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.reference import Reference


def keep_checkpoint(
    role: Role, engine: DeepSpeedEngine, state: TrainingState, reference: Reference | None = None
) -> None:
    """Every rank calls it."""
    role.heartbeat.beat("checkpoint")
    began = time.monotonic()
    save_checkpoint(
        engine,
        role.run.checkpoints,
        state,
        model_folder=role.experiment.policy.folder,
        keep=role.experiment.trainer.keep_checkpoints,
        on_progress=lambda: role.heartbeat.beat("checkpoint"),
        reference=reference,
    )
    if dist.get_rank() == 0:
        role.store.set("saved", {"step": state.step, "seconds": time.monotonic() - began})
