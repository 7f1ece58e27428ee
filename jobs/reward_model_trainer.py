"""A reward model on one trainer rank: load, read the pairs, train."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from towline.jobs.example_data import context_tokens, data_hash, example_schedule, token_pairs
from towline.jobs.example_trainer import ExampleTrainer, HeldOutValues
from towline.jobs.experiment import RewardModelExperiment, StepRewardExperiment
from towline.jobs.role import Role
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.pair_step import plan_pair_step
from towline.trainer.reward_metrics import calibration_error, hits, score_spread
from towline.trainer.reward_model import PairReward
from towline.trainer.sequence_head import RewardModel, load_reward_model
from towline.trainer.token_examples import TokenPair


def train_on_comparisons(role: Role, experiment: RewardModelExperiment, resume_step: int | None) -> None:
    trainer, engine = experiment.trainer, load_scoring_engine(role, experiment)
    limit = context_tokens(engine.policy.model)
    pairs = token_pairs(role, experiment, experiment.data, limit)
    schedule = example_schedule(len(pairs), experiment)
    objective = PairReward(
        engine=engine,
        config=trainer,
        pairs=pairs,
        rows=schedule.rows,
        total_steps=experiment.steps,
        on_progress=role.heartbeat.beat,
    )
    evaluation = experiment.evaluation
    held_out = [] if evaluation is None else token_pairs(role, experiment, evaluation.data, limit)

    def evaluate() -> HeldOutValues:
        """How often the chosen one has the larger score, how sure the model is, and how far scores are spread."""
        scores_P2 = _scores(role, experiment, engine, held_out)
        margins_P = scores_P2[:, 0] - scores_P2[:, 1]
        return HeldOutValues(
            measure="accuracy",
            sums=hits(margins_P),
            sizes=[1] * len(held_out),
            margins=margins_P,
            more={
                "margin": float(margins_P.mean()),
                "calibration_error": calibration_error(scores_P2[:, 0], scores_P2[:, 1]),
                **{f"score_{name}": value for name, value in score_spread(scores_P2).items()},
            },
        )

    ExampleTrainer(
        role=role,
        engine=engine,
        objective=objective,
        data_hash=data_hash(
            [sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)],
            [pair.margin for pair in pairs],
            schedule,
        ),
        resume_step=resume_step,
        every=None if evaluation is None else evaluation.every,
        evaluate=evaluate if held_out else None,
    ).run()


def load_scoring_engine(
    role: Role, experiment: RewardModelExperiment | StepRewardExperiment
) -> DeepSpeedEngine[RewardModel]:
    trainer = experiment.trainer
    model = load_reward_model(
        experiment.policy.folder,
        precision=trainer.precision,
        head_seed=experiment.seed,
        gradient_checkpointing=trainer.gradient_checkpointing,
        packing=trainer.packing,
        score_of="step" if isinstance(experiment, StepRewardExperiment) else "completion",
    )
    engine = DeepSpeedEngine(model, trainer)
    role.heartbeat.beat("loaded")
    return engine


def _scores(
    role: Role,
    experiment: RewardModelExperiment,
    engine: DeepSpeedEngine[RewardModel],
    pairs: Sequence[TokenPair],
) -> NDArray[np.float64]:
    """[pairs, 2], of chosen and rejected; the same on every rank."""
    scores_P2 = torch.zeros(len(pairs), 2, dtype=torch.float64)
    for batch, members in plan_pair_step(pairs, experiment.trainer, engine.policy).batches():
        role.heartbeat.beat("evaluate")
        scores_P2[members] = engine.evaluate_scores(batch, batch.last_index).double().cpu().view(-1, 2)
    dist.all_reduce(scores_P2)
    return scores_P2.numpy()
