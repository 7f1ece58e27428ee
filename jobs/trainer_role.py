"""One trainer rank: join the others, seed, and train by the objective."""

import os
import random

import numpy as np
import torch

from towline.jobs.experiment import (
    DpoExperiment,
    GrpoExperiment,
    IteratedDpoExperiment,
    RewardModelExperiment,
    SftExperiment,
    StepRewardExperiment,
)
from towline.jobs.launched import launched_rank
from towline.jobs.rendezvous import World, find_world, join_trainer_group
from towline.jobs.role import Role, run_role

TRAINER_TIMEOUT_S = 1800.0


def train_run(role: Role, world: World) -> None:
    resume = os.environ.get("TOWLINE_RESUME_STEP")
    resume_step = None if resume is None else int(resume)
    role.heartbeat.beat("join")
    join_trainer_group(role.store, world, role.attempt, TRAINER_TIMEOUT_S)
    _seed_everything(role.experiment.seed, is_deterministic=role.experiment.deterministic)
    role.heartbeat.beat("load")
    # What other objectives need takes time to import.
    match role.experiment:
        case GrpoExperiment() | IteratedDpoExperiment():
            from towline.jobs.rollout_trainer import train_on_rollouts

            train_on_rollouts(role, resume_step)
        case SftExperiment() as experiment:
            from towline.jobs.sft_trainer import train_on_demonstrations

            train_on_demonstrations(role, experiment, resume_step)
        case DpoExperiment() as experiment:
            from towline.jobs.dpo_trainer import train_on_preferences

            train_on_preferences(role, experiment, resume_step)
        case RewardModelExperiment() as experiment:
            from towline.jobs.reward_model_trainer import train_on_comparisons

            train_on_comparisons(role, experiment, resume_step)
        case StepRewardExperiment() as experiment:
            from towline.jobs.step_reward_trainer import train_on_judged_steps

            train_on_judged_steps(role, experiment, resume_step)


def _seed_everything(seed: int, *, is_deterministic: bool) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.use_deterministic_algorithms(is_deterministic)
    # DeepSpeed makes buffers of gigabytes, of which a small model uses little; filling them took seconds a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    run_role(f"trainer.{launched_rank()}", lambda role: train_run(role, find_world()))


if __name__ == "__main__":
    main()
