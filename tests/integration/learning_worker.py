"""One process of real parts, in which members of the GRPO family learn one after the other. Used by `learning.py`.

    python learning_worker.py FOLDER TASK MEMBER:SEED...

vLLM generates, the experiment's rewards grade, `grpo.train` trains on DeepSpeed, and each version travels through the
real stream to the real receiver. A learning begins with a fresh optimiser and the weights of the model folder, which
the engine gets as version 0. Left out are the control store, leases, ledger and scorer of a run, which have tests of
their own.
"""

import copy
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from integration.learning import MEMBERS, TASKS, Learning
from integration.other_tests import held_out_programs
from towline.jobs.experiment import RolloutExperiment
from towline.jobs.inner_steps import inner_steps, training_temperature
from towline.jobs.load_experiment import load_experiment
from towline.jobs.work import Workload, evaluation_work, training_work
from towline.rollout.grading import Grader
from towline.rollout.sampling import ChunkInFlight, SamplingSettings
from towline.rollout.tokenizing import PromptTokenizer
from towline.rollout.transfer_group import Membership, TransferGroup
from towline.rollout.vllm_engine import VllmEngine
from towline.storage.records import ChunkId, ScoreStatus
from towline.storage.run_directory import RunDirectory
from towline.storage.weight_stream import JoinRequest
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.dynamic_sampling import StepBatch, step_batch, wants_another_wave
from towline.trainer.policy import load_policy
from towline.trainer.reference import Reference
from towline.trainer.rollout_batch import ScoredGroup
from towline.trainer.rollout_steps import Metrics, train
from towline.trainer.weight_publisher import publish_weights

TRANSFER_TIMEOUT_S = 60.0
GRADING_LIMIT_S = 60.0
CONTEXT_TOKENS = 64
"""Of either task a prompt and its completion have fewer than 32."""


class Sampler:
    """The engine with what lies before and behind it: prompts to requests, generated tokens to scored groups."""

    def __init__(self, experiment: RolloutExperiment) -> None:
        self.engine = VllmEngine(
            experiment.policy.folder,
            precision=experiment.rollout.precision,
            max_context_tokens=CONTEXT_TOKENS,
            max_sequences=experiment.rollout.max_sequences,
        )
        self._tokenizer = PromptTokenizer(experiment.policy.folder, chat=experiment.data.chat)
        self._graders: dict[str, Grader] = {}
        """By the rewards' tables."""

    def batch(self, work: Workload, seed: int, step: int) -> StepBatch:
        waves: list[list[ScoredGroup]] = []
        wanted = {"num_wanted": work.prompts_per_step, "max_waves": work.max_waves}
        while not waves or wants_another_wave(waves, **wanted):
            waves.append(self.groups(work, seed, step, len(waves)))
        return step_batch(waves, **wanted)

    def groups(self, work: Workload, seed: int, step: int, wave: int = 0) -> list[ScoredGroup]:
        """All chunks of a wave at once; in canonical order."""
        flights = [self._flight(work, seed, chunk, rows) for chunk, rows in work.chunks(step, wave)]
        for flight in flights:
            for request in flight.requests():
                self.engine.submit(request)
        while self.engine.num_unfinished:
            for generated in self.engine.step():
                next(flight for flight in flights if flight.take(generated))
        groups = [group for flight in flights for group in flight.groups(self._tokenizer.decode)]
        scores = iter(self._grader(work).score(groups))
        return [ScoredGroup(group=group, scores=tuple(next(scores) for _ in group.completions)) for group in groups]

    def _grader(self, work: Workload) -> Grader:
        tables = repr(work.rewards)
        if tables not in self._graders:
            self._graders[tables] = Grader(
                work.rewards,
                max_completion_tokens=work.max_completion_tokens,
                num_workers=1,
                limit_s=GRADING_LIMIT_S,
                folder=Path(),
            )
        return self._graders[tables]

    def close(self) -> None:
        for grader in self._graders.values():
            grader.close()

    def right(self, work: Workload, seed: int, version: int) -> list[bool]:
        scores = [one for scored in self.groups(work, seed, version) for one in scored.scores]
        assert all(one.status is ScoreStatus.OK for one in scores), "a grade that failed is no wrong answer"
        return [one.total == 1.0 for one in scores]

    def _flight(self, work: Workload, seed: int, chunk: ChunkId, rows: tuple[int, ...]) -> ChunkInFlight:
        prompts = [work.data.prompts[row] for row in rows]
        return ChunkInFlight(
            chunk=chunk,
            prompts=prompts,
            prompt_token_ids=[self._tokenizer.encode(prompt.text) for prompt in prompts],
            settings=SamplingSettings(
                group_size=work.group_size,
                temperature=work.temperature,
                max_completion_tokens=work.max_completion_tokens,
                stop_token_ids=tuple(self._tokenizer.stop_token_ids),
                seed=seed,
            ),
            name=f"{work.name}/{chunk}",
        )


class Publication:
    """Sends here, while the engine receives in a thread."""

    def __init__(self, sampler: Sampler, store: str) -> None:
        self._engine = sampler.engine
        self._receiving = ThreadPoolExecutor(max_workers=1)
        common: dict[str, Any] = {"store": store, "prefix": "transfer", "size": 2, "backend": "gloo"}
        joined = self._receiving.submit(self._engine.join, JoinRequest(first_rank=1, **common))
        self._sender = TransferGroup(Membership(rank=0, **common))
        joined.result()

    def publish(self, trainer: DeepSpeedEngine, version: int) -> Metrics:
        received = self._receiving.submit(self._engine.receive, version, TRANSFER_TIMEOUT_S)
        sent = publish_weights(
            trainer, version, sender=self._sender, wire_dtype="float32", timeout_s=TRANSFER_TIMEOUT_S
        )
        assert received.result() == sent
        self._engine.apply(version)
        return {}


class Rollouts:
    def __init__(self, read: Callable[[int], StepBatch]) -> None:
        self.read = read


class Circle:
    """What all learnings of a process share."""

    def __init__(self, experiment: RolloutExperiment, folder: Path) -> None:
        self._folder = folder
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        dist.init_process_group("gloo", store=dist.PrefixStore("trainer", store), rank=0, world_size=1)
        self._sampler = Sampler(experiment)
        self._publication = Publication(self._sampler, f"127.0.0.1:{store.port}")
        self._policy = load_policy(
            experiment.policy.folder,
            temperature=training_temperature(experiment),
            precision=experiment.trainer.precision,
        )

    def close(self) -> None:
        self._sampler.close()

    def learn(self, member: str, experiment: RolloutExperiment) -> Learning:
        began = time.process_time()
        run, seed, config = RunDirectory(self._folder), experiment.seed, experiment.trainer
        training = training_work(experiment, run)
        held_out = evaluation_work(experiment, run) or held_out_programs(training)
        torch.manual_seed(seed)
        # A copy: to prove anew that a model can be packed takes as long as a step.
        trainer = DeepSpeedEngine(copy.deepcopy(self._policy), config)
        reference = (
            Reference(experiment.policy.folder, config, temperature=training_temperature(experiment))
            if config.has_reference_model
            else None
        )
        rows: list[Metrics] = []
        self._publication.publish(trainer, 0)
        before = self._sampler.right(held_out, seed, 0)
        train(
            trainer,
            reference,
            inner_steps(experiment, trainer, reference, on_progress=lambda phase: None),
            steps=range(experiment.steps),
            rollouts=Rollouts(lambda step: self._sampler.batch(training, seed, step)),
            publish=lambda version: self._publication.publish(trainer, version),
            finish_step=lambda step, metrics: rows.append(metrics),
            on_progress=lambda phase: None,
        )
        after = self._sampler.right(held_out, seed, experiment.steps)
        return Learning(
            member=member, seed=seed, before=before, after=after, rows=rows, cpu_s=time.process_time() - began
        )


def main() -> None:
    folder = Path(sys.argv[1])
    path, *settings = TASKS[sys.argv[2]]
    # DeepSpeed asks for these, though no launcher started us.
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    gc.freeze()
    circle: Circle | None = None
    for name in sys.argv[3:]:
        member, seed = name.split(":")
        experiment = load_experiment(path, (*settings, *MEMBERS[member], f"seed={seed}"))
        circle = circle or Circle(experiment, folder)
        (folder / f"{name}.json").write_text(json.dumps(asdict(circle.learn(member, experiment))))
    if circle is not None:
        circle.close()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # As the roles do: threads of a group that is gone can abort the interpreter while it ends.
    os._exit(0)
