"""SFT on one trainer rank: load, read the demonstrations, train."""

import numpy as np

from towline.jobs.example_data import context_tokens, data_hash, example_schedule, token_demonstrations
from towline.jobs.example_trainer import ExampleTrainer, HeldOutValues
from towline.jobs.experiment import SftExperiment, SupervisedExperiment
from towline.jobs.role import Role
from towline.trainer.completion_logprobs import completion_logprobs
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.policy import Policy, load_policy
from towline.trainer.sft import Sft


def train_on_demonstrations(role: Role, experiment: SftExperiment, resume_step: int | None) -> None:
    engine = load_trained_policy(role, experiment)
    limit = context_tokens(engine.policy.model)
    examples = token_demonstrations(role, experiment, experiment.data, limit)
    schedule = example_schedule(len(examples), experiment)
    sft = Sft(
        engine=engine,
        config=experiment.trainer,
        examples=examples,
        rows=schedule.rows,
        total_steps=experiment.steps,
        on_progress=role.heartbeat.beat,
    )
    evaluation = experiment.evaluation
    held_out = None if evaluation is None else token_demonstrations(role, experiment, evaluation.data, limit)

    def evaluate() -> HeldOutValues:
        """How likely held-out demonstrations are."""
        assert held_out is not None
        sums = completion_logprobs(
            engine,
            experiment.trainer,
            [example.tokens for example in held_out],
            trained=[example.trained for example in held_out],
            groups=range(len(held_out)),
            on_progress=lambda: role.heartbeat.beat("evaluate"),
        )
        return HeldOutValues(measure="nll", sums=-sums, sizes=[int(example.trained.sum()) for example in held_out])

    ExampleTrainer(
        role=role,
        engine=engine,
        objective=sft,
        data_hash=data_hash(
            [example.tokens for example in examples],
            [np.packbits(example.trained).tobytes().hex() for example in examples],
            schedule,
        ),
        resume_step=resume_step,
        every=None if evaluation is None else evaluation.every,
        evaluate=None if held_out is None else evaluate,
    ).run()


def load_trained_policy(role: Role, experiment: SupervisedExperiment) -> DeepSpeedEngine[Policy]:
    trainer = experiment.trainer
    policy = load_policy(
        experiment.policy.folder,
        temperature=1.0,
        precision=trainer.precision,
        gradient_checkpointing=trainer.gradient_checkpointing,
        packing=trainer.packing,
        lora=trainer.lora,
    )
    engine = DeepSpeedEngine(policy, trainer)
    role.heartbeat.beat("loaded")
    return engine
