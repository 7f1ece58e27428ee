"""A reward model of steps on one trainer rank: load, read the judged steps, train."""

import numpy as np

from towline.jobs.example_data import context_tokens, data_hash, example_schedule, token_steps
from towline.jobs.example_trainer import ExampleTrainer, HeldOutValues
from towline.jobs.experiment import StepRewardExperiment
from towline.jobs.reward_model_trainer import load_scoring_engine
from towline.jobs.role import Role
from towline.trainer.step_reward import StepReward, num_judged, step_scores
from towline.trainer.token_examples import NO_LABEL


def train_on_judged_steps(role: Role, experiment: StepRewardExperiment, resume_step: int | None) -> None:
    trainer, engine = experiment.trainer, load_scoring_engine(role, experiment)
    limit = context_tokens(engine.policy.model)
    examples = token_steps(role, experiment, experiment.data, limit)
    schedule = example_schedule(len(examples), experiment)
    objective = StepReward(
        engine=engine,
        config=trainer,
        examples=examples,
        rows=schedule.rows,
        total_steps=experiment.steps,
        on_progress=role.heartbeat.beat,
    )
    evaluation = experiment.evaluation
    held_out = [] if evaluation is None else token_steps(role, experiment, evaluation.data, limit)

    def evaluate() -> HeldOutValues:
        """How many of the judged steps have a score of the right sign."""
        scores = step_scores(engine, trainer, held_out, lambda: role.heartbeat.beat("evaluate"))
        right = [
            float(np.where(np.isnan(found), np.nan, (found > 0) == (one.labels == 1))[one.labels != NO_LABEL].sum())
            for found, one in zip(scores, held_out, strict=True)
        ]
        sizes = [num_judged(one) for one in held_out]
        return HeldOutValues(measure="step_accuracy", sums=np.array(right), sizes=sizes)

    ExampleTrainer(
        role=role,
        engine=engine,
        objective=objective,
        data_hash=data_hash(
            [one.tokens for one in examples],
            [[one.step_ends.tolist(), one.labels.tolist()] for one in examples],
            schedule,
        ),
        resume_step=resume_step,
        every=None if evaluation is None else evaluation.every,
        evaluate=evaluate if held_out else None,
    ).run()
