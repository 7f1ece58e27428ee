"""DPO on one trainer rank: load, read the pairs, take the reference's log-probs once, train."""

import math
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from towline.jobs.example_data import context_tokens, data_hash, example_schedule, token_digest, token_pairs
from towline.jobs.example_trainer import ExampleTrainer, HeldOutValues
from towline.jobs.experiment import DpoExperiment
from towline.jobs.role import Role
from towline.jobs.sft_trainer import load_trained_policy
from towline.storage.checkpoints import model_identity
from towline.storage.reference_table import (
    ReferenceIdentity,
    read_reference_table,
    table_path,
    write_reference_table,
)
from towline.storage.run_directory import read_jsonl
from towline.trainer.completion_logprobs import completion_logprobs
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.dpo import Dpo
from towline.trainer.falling_chosen import FallingChosen
from towline.trainer.packing import TokenSequence
from towline.trainer.pair_step import num_completion_tokens
from towline.trainer.policy import Policy
from towline.trainer.reward_metrics import hits
from towline.trainer.token_examples import TokenPair


def train_on_preferences(role: Role, experiment: DpoExperiment, resume_step: int | None) -> None:
    engine = load_trained_policy(role, experiment)
    limit = context_tokens(engine.policy.model)
    pairs = token_pairs(role, experiment, experiment.data, limit)
    schedule = example_schedule(len(pairs), experiment)
    evaluation = experiment.evaluation
    held_out = [] if evaluation is None else token_pairs(role, experiment, evaluation.data, limit)
    # Before the first step, or a checkpoint is taken up, the policy is the reference.
    reference = _reference(role, experiment, engine, pairs)
    reference_held_out = _reference(role, experiment, engine, held_out) if held_out else np.empty((0, 2))
    dpo = Dpo(
        engine=engine,
        config=experiment.trainer,
        pairs=pairs,
        reference=reference,
        rows=schedule.rows,
        total_steps=experiment.steps,
        on_progress=role.heartbeat.beat,
    )

    def evaluate() -> HeldOutValues:
        """How often the policy prefers, more than the reference does, what was preferred."""
        log_ratios_P2 = _logprobs(role, experiment, engine, held_out, "evaluate") - reference_held_out
        if experiment.trainer.length_normalised or experiment.trainer.loss == "ipo":
            log_ratios_P2 /= np.array([num_completion_tokens(pair) for pair in held_out])
        delta_P = log_ratios_P2[:, 0] - log_ratios_P2[:, 1]
        return HeldOutValues(
            measure="win_rate",
            sums=hits(delta_P),
            sizes=[1] * len(held_out),
            more={"margin": float(delta_P.mean()) * experiment.trainer.beta},
        )

    falling = FallingChosen()
    known = (row["preference/chosen_reward"] for row in read_jsonl(role.run.metrics))
    falling.recall(math.nan if reward is None else reward for reward in known)
    ExampleTrainer(
        role=role,
        engine=engine,
        objective=dpo,
        data_hash=data_hash(_sequences(pairs), None, schedule),
        resume_step=resume_step,
        every=None if evaluation is None else evaluation.every,
        evaluate=evaluate if held_out else None,
        alarm=lambda step, metrics: falling.judge(step, metrics["preference/chosen_reward"]),
    ).run()


def _reference(
    role: Role, experiment: DpoExperiment, engine: DeepSpeedEngine[Policy], pairs: Sequence[TokenPair]
) -> NDArray[np.float64]:
    """[pairs, 2], from the table if there is one."""
    identity = ReferenceIdentity(
        model=model_identity(experiment.policy.folder),
        data=token_digest(_sequences(pairs)),
        precision=experiment.trainer.precision,
    )
    path = table_path(experiment.policy.reference_tables or role.run.reference_tables, identity)
    is_there = [path.exists()]
    dist.broadcast_object_list(is_there, src=0)
    if is_there[0]:
        return read_reference_table(path, identity)
    logprobs_P2 = _logprobs(role, experiment, engine, pairs, "reference")
    if dist.get_rank() == 0:
        write_reference_table(path, identity, logprobs_P2)
    return logprobs_P2


def _logprobs(
    role: Role, experiment: DpoExperiment, engine: DeepSpeedEngine[Policy], pairs: Sequence[TokenPair], phase: str
) -> NDArray[np.float64]:
    """[pairs, 2], sums over the completions of chosen and rejected."""
    sequences = _sequences(pairs)
    sums = completion_logprobs(
        engine,
        experiment.trainer,
        sequences,
        trained=[
            np.ones(len(sequence.token_ids) - sequence.num_prompt_tokens, dtype=np.bool_) for sequence in sequences
        ],
        groups=[number // 2 for number in range(len(sequences))],
        on_progress=lambda: role.heartbeat.beat(phase),
    )
    return sums.reshape(-1, 2)


def _sequences(pairs: Sequence[TokenPair]) -> list[TokenSequence]:
    return [sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)]
