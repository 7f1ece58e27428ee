"""One trainer rank: load, prove the way to the engines, train, publish, keep checkpoints.

In replay mode the same loop reads its rollouts from the ledger and publishes to nobody.
"""

import math
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from towline.jobs.held_out import HeldOut
from towline.jobs.probe import Probe, probe_tokens
from towline.jobs.rendezvous import World, find_world, join_trainer_group
from towline.jobs.role import Role, run_role
from towline.jobs.rollout_role import PROBE_TOKENS
from towline.jobs.trainer_rollouts import LiveRollouts, RecordedRollouts
from towline.jobs.weight_sync import Publisher
from towline.jobs.work import Workload, evaluation_work, training_work
from towline.storage import checkpoints
from towline.storage.ledger import read_scored_shard
from towline.storage.metrics import MetricsWriter, append_jsonl
from towline.trainer import grpo
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.packing import PackedBatch, TokenSequence, pack
from towline.trainer.policy import load_policy
from towline.trainer.reference import Reference

TRAINER_TIMEOUT_S = 1800.0
PERTURBATION = 0.1
"""Size of the start's large step, in standard deviations of each weight: it moves log-probs by a nat or two."""


def train_run(role: Role, world: World) -> None:
    replay_until = os.environ.get("TOWLINE_REPLAY_STEP")
    role.heartbeat.beat("join")
    join_trainer_group(role.store, world, role.attempt, TRAINER_TIMEOUT_S)
    _seed_everything(role.experiment.seed)
    role.heartbeat.beat("load")
    engine, reference = _load(role)
    if replay_until is not None:
        _replay(role, engine, reference, int(replay_until))
        return
    live = _Live(role, engine)
    live.prove()
    live.evaluate(0)
    role.store.set("start", {"step": 0})
    next_step = _train(
        role,
        engine,
        reference,
        steps=range(role.experiment.steps),
        rollouts=LiveRollouts(role, live.training),
        publish=live.publish,
        finish_step=live.finish_step,
    )
    live.close(next_step)


def _load(role: Role) -> tuple[DeepSpeedEngine, Reference | None]:
    experiment = role.experiment
    folder, temperature = Path(experiment.policy.model), experiment.rollout.temperature
    policy = load_policy(
        folder,
        temperature=temperature,
        precision=experiment.trainer.precision,
        gradient_checkpointing=experiment.trainer.gradient_checkpointing,
    )
    engine = DeepSpeedEngine(policy, experiment.trainer)
    role.heartbeat.beat("load")
    has_reference = experiment.trainer.kl_beta > 0
    reference = Reference(folder, experiment.trainer, temperature=temperature) if has_reference else None
    return engine, reference


def _train(
    role: Role,
    engine: DeepSpeedEngine,
    reference: Reference | None,
    *,
    steps: range,
    rollouts: grpo.Rollouts,
    publish: Callable[[int], grpo.Metrics],
    finish_step: Callable[[int, grpo.Metrics], None],
) -> int:
    return grpo.train(
        engine,
        reference,
        role.experiment.trainer,
        steps=steps,
        seed=role.experiment.seed,
        rollouts=rollouts,
        max_completion_tokens=role.experiment.rollout.max_completion_tokens,
        publish=publish,
        finish_step=finish_step,
        on_progress=role.heartbeat.beat,
    )


class _Live:
    """What a live run adds to the loop: engines to publish to, evaluations, metrics, checkpoints."""

    def __init__(self, role: Role, engine: DeepSpeedEngine) -> None:
        self.role, self.engine = role, engine
        experiment = role.experiment
        self.training = training_work(experiment, self.role.run)
        evaluation = evaluation_work(experiment, self.role.run)
        self.held_out = HeldOut(self.role, evaluation) if evaluation else None
        both_float32 = experiment.trainer.precision == experiment.rollout.precision == "float32"
        self.probe = Probe(is_float32=both_float32)
        self.publisher = Publisher(
            store=self.role.store,
            engine=self.engine,
            num_engines=experiment.local.engines,
            wire_dtype="float32" if both_float32 else "bfloat16",
            timeout_s=experiment.run.sync_timeout_s,
            on_wait=lambda: self.role.heartbeat.beat("publish"),
            backend=os.environ["TOWLINE_TRANSFER_BACKEND"],
            attempt=self.role.attempt,
        )
        self.is_first = dist.get_rank() == 0
        self.metrics = MetricsWriter(self.role.run.metrics, self.role.run.tensorboard) if self.is_first else None
        self.kept: set[int] = set()

    def prove(self) -> None:
        """Show once, with a step too large to overlook, that what is published is what the engines compute with."""
        limits = self.engine.policy.model.config
        length = min(PROBE_TOKENS, getattr(limits, "max_position_embeddings", PROBE_TOKENS + 1) - 1)
        tokens = probe_tokens(limits.vocab_size, length)
        self._probe_batch = pack([TokenSequence(token_ids=np.array(tokens), num_prompt_tokens=1)])
        original = self._own_logprobs()
        if self.is_first:
            self.role.store.set("probe_tokens", tokens)
            self.probe.calibrate(self._loaded_probes(), original)
        with self.engine.perturbed(seed=self.role.experiment.seed, size=PERTURBATION):
            self._prove_step(new := self._own_logprobs(), original)
        self._prove_step(original, new)
        self._previous = original

    def _loaded_probes(self) -> list[list[float]]:
        """Each engine's answer with the weights it read itself, once all are there."""
        return [
            self.role.store.wait(f"engine/{number}", math.inf, lambda: self.role.heartbeat.beat("wait for engines"))[
                "probe"
            ]
            for number in range(self.publisher.num_engines)
        ]

    def _prove_step(self, new: np.ndarray, previous: np.ndarray) -> None:
        engines = self.publisher.publish(0)
        if self.is_first:
            self.probe.judge(0, engines, new, previous, must_conclude=True)

    def publish(self, version: int) -> grpo.Metrics:
        engines = self.publisher.publish(version)
        self.role.heartbeat.beat("probe")
        new, previous = self._own_logprobs(), self._previous
        self._previous = new
        return self.probe.judge(version, engines, new, previous) if self.is_first else {}

    def finish_step(self, step: int, metrics: grpo.Metrics) -> None:
        if self.metrics is not None:
            self.metrics.write(step, metrics | _engine_seconds(self.training, step))
        experiment = self.role.experiment
        if (step + 1) % experiment.trainer.checkpoint_every == 0:
            self.save(step + 1)
        every = experiment.evaluation.every if experiment.evaluation else None
        if every and (step + 1) % every == 0 and step + 1 < experiment.steps:
            self.evaluate(step + 1)

    def evaluate(self, version: int) -> None:
        if self.held_out is not None:
            self.held_out.evaluate(version)

    def close(self, next_step: int) -> None:
        """Leave a checkpoint, judge the last version unless stopped, and let the engines go."""
        if next_step not in self.kept:
            self.save(next_step)
        is_done = next_step == self.role.experiment.steps
        if is_done:
            self.evaluate(next_step)
        if self.metrics is not None:
            self.metrics.close()
            self.role.store.set("finished", {"status": "done" if is_done else "stopped", "step": next_step})

    def save(self, step: int) -> None:
        self.role.heartbeat.beat("checkpoint")
        folder = self.role.run.checkpoints
        if self.is_first:
            checkpoints.remove_incomplete(folder, step)
        dist.barrier()
        self.engine.save(checkpoints.checkpoint_path(folder, step), {"step": step, "rng": _rng_state()})
        dist.barrier()
        if self.is_first:
            checkpoints.mark_complete(folder, step, {"step": step, "ranks": dist.get_world_size()})
            checkpoints.retain(folder, self.role.experiment.trainer.keep_checkpoints)
        self.kept.add(step)

    def _own_logprobs(self) -> np.ndarray:
        return _probe_logprobs(self.engine, self._probe_batch)


def _probe_logprobs(engine: DeepSpeedEngine, batch: PackedBatch) -> np.ndarray:
    """At temperature 1, as the engines answer."""
    with engine.policy.at_temperature(1.0):
        return engine.evaluate(batch).cpu().numpy()


def _replay(role: Role, engine: DeepSpeedEngine, reference: Reference | None, last_step: int) -> None:
    """Train again from the newest checkpoint at or before `last_step`, on the recorded rollouts."""
    work = training_work(role.experiment, role.run)
    first = checkpoints.newest_step(role.run.checkpoints, at_most=last_step) or 0
    if first:
        engine.load(checkpoints.checkpoint_path(role.run.checkpoints, first))
    rows = role.run.logs(role.attempt) / "replay.jsonl"

    def finish_step(step: int, metrics: grpo.Metrics) -> None:
        if dist.get_rank() == 0:
            append_jsonl(rows, {"step": step, **metrics})

    _train(
        role,
        engine,
        reference,
        steps=range(first, last_step + 1),
        rollouts=RecordedRollouts(work),
        publish=lambda version: {},
        finish_step=finish_step,
    )
    if dist.get_rank() == 0:
        role.store.set("finished", {"status": "done", "step": last_step + 1})


def _engine_seconds(work: Workload, step: int) -> grpo.Metrics:
    """Generation and scoring time of a step: from the first request to the last, by each engine's own clock."""
    shards = [read_scored_shard(work.path(chunk)) for chunk, _ in work.chunks(step)]
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    for shard, _ in shards:
        engine = shard.origin.engine
        began[engine] = min(began.get(engine, shard.origin.began), shard.origin.began)
        ended[engine] = max(ended.get(engine, shard.origin.ended), shard.origin.ended)
    return {
        "seconds/generate": max(ended[engine] - began[engine] for engine in began),
        "seconds/score": sum(sheet.ended - sheet.began for _, sheet in shards),
    }


def _rng_state() -> dict[str, object]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


def main() -> None:
    world = find_world()
    run_role(f"trainer.{world.rank}", lambda role: train_run(role, world))


if __name__ == "__main__":
    main()
