"""Training on rollouts, on one trainer rank: load, prove the way to the engines, train, publish, keep checkpoints.

In replay mode the same loop reads its rollouts from the ledger and publishes to nobody.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from towline.jobs.failed_scores import FailedScores
from towline.jobs.inner_steps import inner_steps, training_temperature
from towline.jobs.live_trainer import LiveTrainer
from towline.jobs.role import Role
from towline.jobs.trainer_rollouts import RecordedRollouts
from towline.jobs.training_state import training_state
from towline.jobs.work import training_work
from towline.storage import checkpoints
from towline.storage.errors import FailedScoresError
from towline.storage.metrics import append_jsonl
from towline.trainer.checkpoint import load_checkpoint
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.policy import Policy, load_policy
from towline.trainer.reference import Reference
from towline.trainer.rollout_steps import Metrics, Rollouts, train


def train_on_rollouts(role: Role, resume_step: int | None) -> None:
    replay_until = os.environ.get("TOWLINE_REPLAY_STEP")
    # What a replay writes is no part of the run's checkpoints.
    refreshed = role.run.checkpoints if replay_until is None else role.run.logs(role.attempt)
    engine, reference = _load(role, refreshed)
    role.heartbeat.beat("loaded")
    if replay_until is not None:
        _replay(role, engine, reference, int(replay_until))
        if reference is not None:
            reference.discard()
        return
    live = LiveTrainer(role, engine, reference, resume_step=resume_step)
    live.start()
    role.heartbeat.beat("ready")
    live.evaluate_if_due(live.first_step)
    role.store.set("start", {"step": live.first_step})
    try:
        next_step = _train(
            role,
            engine,
            reference,
            steps=range(live.first_step, role.circle.steps),
            rollouts=live.rollouts,
            publish=live.publish,
            finish_step=live.finish_step,
        )
    except FailedScoresError:  # on every rank, and before the step changed anything
        live.keep_weights()
        raise
    live.close(next_step)
    if reference is not None:
        reference.discard()


def _load(role: Role, refreshed: Path) -> tuple[DeepSpeedEngine[Policy], Reference | None]:
    experiment = role.circle
    folder, temperature = experiment.policy.folder, training_temperature(experiment)
    policy = load_policy(
        folder,
        temperature=temperature,
        precision=experiment.trainer.precision,
        gradient_checkpointing=experiment.trainer.gradient_checkpointing,
        packing=experiment.trainer.packing,
        lora=experiment.trainer.lora,
    )
    engine = DeepSpeedEngine(policy, experiment.trainer)
    role.heartbeat.beat("load")
    if not experiment.trainer.has_reference_model:
        return engine, None
    reference = Reference(
        folder,
        experiment.trainer,
        temperature=temperature,
        home=experiment.policy.reference,
        refreshed=refreshed,
        adapted=engine if experiment.trainer.lora is not None else None,
    )
    return engine, reference


def _train(
    role: Role,
    engine: DeepSpeedEngine[Policy],
    reference: Reference | None,
    *,
    steps: range,
    rollouts: Rollouts,
    publish: Callable[[int], Metrics],
    finish_step: Callable[[int, Metrics], None],
) -> int:
    return train(
        engine,
        reference,
        inner_steps(role.circle, engine, reference, on_progress=role.heartbeat.beat),
        steps=steps,
        rollouts=rollouts,
        publish=publish,
        finish_step=finish_step,
        on_progress=role.heartbeat.beat,
    )


def _replay(role: Role, engine: DeepSpeedEngine[Policy], reference: Reference | None, last_step: int) -> None:
    """Train again from the newest checkpoint at or before `last_step`, on the recorded rollouts."""
    work = training_work(role.circle, role.run)
    folder = role.run.checkpoints
    first = checkpoints.newest_step(folder, at_most=last_step) or 0
    if first:
        present = training_state(role.circle, work.data_hash, step=first)
        load_checkpoint(engine, folder, first, present, reference=reference)
    rows = role.run.logs(role.attempt) / "replay.jsonl"

    def finish_step(step: int, metrics: Metrics) -> None:
        if dist.get_rank() == 0:
            append_jsonl(rows, {"step": step, **metrics})

    _train(
        role,
        engine,
        reference,
        steps=range(first, last_step + 1),
        rollouts=RecordedRollouts(work, FailedScores(role.circle.scoring.max_failed)),
        publish=lambda version: {},
        finish_step=finish_step,
    )
    if dist.get_rank() == 0:
        role.store.set("finished", {"status": "done", "step": last_step + 1})
