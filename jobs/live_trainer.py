"""What a live run adds to the training loop: engines to publish to, evaluations, metrics, lineage, checkpoints."""

import math
import os
from collections.abc import Mapping

import numpy as np
import torch.distributed as dist

from towline.jobs.agreement import Agreement
from towline.jobs.experiment import GrpoExperiment
from towline.jobs.failed_scores import FailedScores
from towline.jobs.held_out import HeldOut
from towline.jobs.keep_checkpoint import keep_checkpoint
from towline.jobs.probe import Probe, probe_tokens
from towline.jobs.role import Role
from towline.jobs.rollout_role import PROBE_TOKENS
from towline.jobs.trainer_rollouts import LiveRollouts
from towline.jobs.training_state import training_state
from towline.jobs.weight_sync import Publisher
from towline.jobs.work import Workload, evaluation_work, training_work
from towline.storage.checkpoints import checkpoint_path, model_identity
from towline.storage.errors import CheckpointError
from towline.storage.ledger import read_shard, sealed_chunks, sealed_steps
from towline.storage.lineage import Lineage, fits
from towline.storage.metrics import MetricsWriter, append_jsonl
from towline.storage.run_directory import read_jsonl
from towline.storage.set_aside import set_aside
from towline.trainer.checkpoint import load_checkpoint
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.falling_chosen import FallingChosen
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.reference import Reference
from towline.trainer.rollout_steps import Metrics
from towline.trainer.tripwires import Tripwires

PERTURBATION = 0.1
"""Size of the start's large step, in standard deviations of each weight: it moves log-probs by a nat or two."""


class LiveTrainer:
    """
    Args:
        resume_step: the checkpoint to go on from; None starts with the model folder's weights.
    """

    def __init__(
        self, role: Role, engine: DeepSpeedEngine, reference: Reference | None, resume_step: int | None
    ) -> None:
        self.role, self.engine, self.reference, self.resume_step = role, engine, reference, resume_step
        experiment = role.circle
        both_float32 = experiment.trainer.precision == experiment.rollout.precision == "float32"
        self.first_step = resume_step or 0
        self.is_first_rank = dist.get_rank() == 0
        self.lineage = Lineage.open(role.run, role.attempt)
        self.training = training_work(experiment, role.run)
        evaluation = evaluation_work(experiment, role.run)
        # A scripted engine answers from its script, whatever weights it is sent.
        self.probe = Probe(is_float32=both_float32) if experiment.rollout.engine == "vllm" else None
        self.publisher = Publisher(
            store=role.store,
            engine=engine,
            num_engines=experiment.local.engines,
            wire_dtype="float32" if both_float32 else "bfloat16",
            timeout_s=experiment.run.sync_timeout_s,
            on_wait=lambda: role.heartbeat.beat("publish"),
            settle=self._settle,
            meanwhile=self._note_own_logprobs,
            backend=os.environ["TOWLINE_TRANSFER_BACKEND"],
            attempt=role.attempt,
        )
        self.version = self.first_step
        agreement = Agreement(role, lambda: self.publisher.has_lost_every_engine, self._publish)
        self.rollouts = LiveRollouts(
            role, self.training, agreement, self.lineage, FailedScores(experiment.scoring.max_failed)
        )
        self.held_out = HeldOut(role, evaluation, agreement) if evaluation else None
        self.metrics = (
            MetricsWriter(role.run.metrics, role.run.tensorboard, first_step=self.first_step)
            if self.is_first_rank
            else None
        )
        self.tripwires = Tripwires(
            engine_precision=experiment.rollout.precision if experiment.rollout.engine == "vllm" else None,
            kl_beta=experiment.trainer.kl_beta if isinstance(experiment, GrpoExperiment) else 0.0,
            precision=experiment.trainer.precision,
            is_exact=engine.device.type == "cpu",
            trained_models=tuple(one.part_name for one in experiment.rewards if one.is_reward_model and one.weight > 0),
            watching_models=tuple(
                one.part_name for one in experiment.rewards if one.is_reward_model and not one.weight
            ),
        )
        known = read_jsonl(role.run.metrics) if self.is_first_rank else []
        self.tripwires.recall(known)
        self.falling_chosen = FallingChosen()
        self.falling_chosen.recall(map(_chosen_reward, known))
        self.saved: int | None = resume_step
        self._is_proven = False
        self._saved_digest = ""
        """Of the weights that the checkpoint says it has; "" if it does not say."""

    def start(self) -> None:
        """Go on from the checkpoint, if there is one, and see that trainer and engines have the same weights."""
        limits = self.engine.policy.model.config
        length = min(PROBE_TOKENS, getattr(limits, "max_position_embeddings", PROBE_TOKENS + 1) - 1)
        tokens = probe_tokens(limits.vocab_size, length)
        self._probe_batch = pack([TokenSequence(token_ids=np.array(tokens), num_prompt_tokens=1)])
        self._note_own_logprobs()
        if self.is_first_rank:
            self.role.store.set("probe_tokens", tokens)
        # While the engines load.
        digest = self.publisher.present_digest(self.version) if self.resume_step is None else ""
        engines = self._loaded_probes() if self.is_first_rank else []
        if engines and self.probe is not None:
            self.probe.calibrate(engines, self._own)
        if self.resume_step is not None:
            self.role.heartbeat.beat("load")
            present = training_state(self.role.circle, self.training.data_hash, step=self.resume_step)
            saved = load_checkpoint(
                self.engine,
                self.role.run.checkpoints,
                self.resume_step,
                present,
                on_progress=lambda: self.role.heartbeat.beat("load"),
                reference=self.reference,
            )
            self.lineage.continue_from(saved.branch)
            self._saved_digest = saved.stream_digest
            self._note_own_logprobs()
        elif self.publisher.adopt(self.version, digest, model_identity(self.role.circle.policy.folder)):
            if engines and self.probe is not None:
                self.probe.judge(self.version, engines, self._own, self._own)
            return
        self._prove_and_publish()

    def publish(self, version: int) -> Metrics:
        self.version = version
        return self._publish() if self._is_proven else self._prove_and_publish()

    def _prove_and_publish(self) -> Metrics:
        """The first publication proves that engines compute with what they are sent: a step too large to overlook,
        there and back. They generate nothing in between."""
        with self.engine.perturbed(seed=self.role.circle.seed, size=PERTURBATION):
            self._publish(is_trial=True)
        self._is_proven = True
        return self._publish(must_conclude=True)

    def _publish(self, *, is_trial: bool = False, must_conclude: bool = False) -> Metrics:
        """Bring the present weights to the engines and judge, on rank 0, whether they compute with them."""
        previous = self._own
        engines = self.publisher.publish(self.version, is_trial=is_trial)
        if not self.is_first_rank:
            return {}
        metrics = {"seconds/probe": self.publisher.probe_s}
        if self.probe is not None:
            must_conclude = must_conclude or is_trial
            metrics |= self.probe.judge(self.version, engines, self._own, previous, must_conclude=must_conclude)
        return metrics

    def finish_step(self, step: int, metrics: Metrics) -> None:
        if self.metrics is not None:
            metrics = metrics | self.rollouts.metrics
            judged, alarms = self.tripwires.judge(step, metrics)
            falling = self.falling_chosen.judge(step, _chosen_reward(metrics))
            alarms += [] if falling is None else [falling]
            for text in alarms:
                append_jsonl(self.role.run.alarms, {"step": step, "text": text})
            self.metrics.write(step, metrics | judged)
        experiment = self.role.circle
        if (step + 1) % experiment.trainer.checkpoint_every == 0:
            self._save(step + 1)
        if step + 1 < experiment.steps:
            self.evaluate_if_due(step + 1)

    def evaluate_if_due(self, version: int) -> None:
        """Before the first step, and every so many steps."""
        every = self.role.circle.evaluation.every if self.role.circle.evaluation else None
        if version == 0 or (every is not None and version % every == 0):
            self._evaluate(version)

    def keep_weights(self) -> None:
        """A checkpoint of the present version, of which nothing was trained further. Every rank calls it."""
        if self.version != self.saved:
            self._save(self.version)

    def close(self, next_step: int) -> None:
        """Leave a checkpoint, judge the last version unless stopped, and let the engines go."""
        if next_step != self.saved:
            self._save(next_step)
        is_done = next_step == self.role.circle.steps
        if is_done:
            self._evaluate(next_step)
        if self.metrics is not None:
            self.metrics.close()
            self.role.store.set("finished", {"status": "done" if is_done else "stopped", "step": next_step})

    def _evaluate(self, version: int) -> None:
        if self.held_out is not None:
            self.held_out.evaluate(version)

    def _save(self, step: int) -> None:
        state = training_state(
            self.role.circle,
            self.training.data_hash,
            step=step,
            branch=self.lineage.branch,
            stream_digest=self.publisher.digest,
        )
        keep_checkpoint(self.role, self.engine, state, self.reference)
        self.saved = step

    def _settle(self, version: int, digest: str) -> int:
        """Note which weights the version has, and set aside what was generated by others that had its name."""
        if version == self.resume_step and self._saved_digest not in ("", digest):
            raise CheckpointError(
                f"checkpoint {version}: the policy that was loaded is not the one that was saved (weight stream "
                f"{digest[:12]}…, saved {self._saved_digest[:12]}…). Go on from an earlier one: move "
                f"{checkpoint_path(self.role.run.checkpoints, version)} away."
            )
        if self.lineage.settle(version, digest):
            print(f"version {version} has other weights than before: branch {self.lineage.branch} begins", flush=True)
            self._set_aside_misfits(self.training, version)
            if self.held_out is not None:
                self._set_aside_misfits(self.held_out.work, version)
        return self.lineage.branch

    def _set_aside_misfits(self, work: Workload, first_step: int) -> None:
        for step in sealed_steps(work.folder):
            for path in sealed_chunks(work.folder, step) if step >= first_step else ():
                reason = fits(
                    self.lineage,
                    read_shard(path).origin,
                    sampling_hash=work.sampling_hash,
                    max_staleness=self.role.circle.rollout.max_staleness if work is self.training else 0,
                )
                if reason is not None:
                    set_aside(self.role.run, path, reason, self.role.attempt)

    def _loaded_probes(self) -> list[list[float]]:
        """Each engine's answer with the weights it read itself, once all are there."""
        return [
            self.role.store.wait(f"engine/{number}", math.inf, lambda: self.role.heartbeat.beat("wait for engines"))[
                "probe"
            ]
            for number in range(self.publisher.num_engines)
        ]

    def _note_own_logprobs(self) -> None:
        """Of the probe text at temperature 1, as the engines answer."""
        with self.engine.policy.at_temperature(1.0):
            self._own = self.engine.evaluate(self._probe_batch).cpu().numpy()


def _chosen_reward(metrics: Mapping[str, float | None]) -> float:
    """NaN where there are no pairs: of GRPO, of a round without any, and of what was not finite."""
    reward = metrics.get("preference/chosen_reward")
    return math.nan if reward is None else reward
