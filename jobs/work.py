"""The two kinds of work an engine does: rollouts to train on, and held-out evaluations.

Pure functions of the experiment: every process computes the same chunks.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from towline.jobs.experiment import RolloutExperiment
from towline.rollout.rewards.config import RewardConfig
from towline.storage.datasets import PromptDataset, load_prompts
from towline.storage.records import ChunkId
from towline.storage.run_directory import RunDirectory
from towline.storage.schedule import PromptSchedule

EVALUATION_CHUNK_PROMPTS = 32


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    """Prefix of its names in the control store."""
    folder: Path
    data: PromptDataset
    chat: bool
    group_size: int
    temperature: float
    max_completion_tokens: int
    chunk_prompts: int
    schedule: PromptSchedule | None
    """None: every step holds the whole dataset."""
    rewards: tuple[RewardConfig, ...]

    @property
    def prompts_per_step(self) -> int:
        """Of one wave."""
        return len(self.data.prompts) if self.schedule is None else self.schedule.prompts_per_step

    @property
    def max_waves(self) -> int:
        return 1 if self.schedule is None else self.schedule.max_waves

    def chunks(self, step: int, wave: int = 0) -> list[tuple[ChunkId, tuple[int, ...]]]:
        """The chunks of one wave of a step in canonical order, each with its dataset rows."""
        rows = tuple(range(len(self.data.prompts))) if self.schedule is None else self.schedule.rows(step, wave)
        return [
            (ChunkId(step=step, wave=wave, chunk=number), rows[start : start + self.chunk_prompts])
            for number, start in enumerate(range(0, len(rows), self.chunk_prompts))
        ]

    def path(self, chunk: ChunkId) -> Path:
        return self.folder / f"{chunk}.h5"

    @cached_property
    def data_hash(self) -> str:
        """Of everything that says which prompts a step holds."""
        hasher = hashlib.blake2b(digest_size=16)
        for prompt in self.data.prompts:
            hasher.update(json.dumps([prompt.row, prompt.text, prompt.answer]).encode())
        schedule = None if self.schedule is None else (self.schedule.prompts_per_step, self.schedule.seed)
        hasher.update(json.dumps(schedule).encode())
        return hasher.hexdigest()

    @cached_property
    def sampling_hash(self) -> str:
        """Of everything but the weights that says what a shard holds; how many waves may follow says nothing of it."""
        settings = [self.data_hash, self.chat, self.group_size, self.temperature, self.max_completion_tokens,
                    self.chunk_prompts]  # fmt: skip
        return hashlib.blake2b(json.dumps(settings).encode(), digest_size=16).hexdigest()

    def lease(self, chunk: ChunkId) -> str:
        """Name of its lease in the control store."""
        return f"lease/{self.name}/{chunk}"


def training_work(experiment: RolloutExperiment, run: RunDirectory) -> Workload:
    data = load_prompts(experiment.data)
    rollout = experiment.rollout
    return Workload(
        name="rollouts",
        folder=run.rollouts,
        data=data,
        chat=experiment.data.chat,
        group_size=rollout.group_size,
        temperature=rollout.temperature,
        max_completion_tokens=rollout.max_completion_tokens,
        chunk_prompts=experiment.chunk_prompts,
        schedule=PromptSchedule(len(data.prompts), rollout.prompts_per_step, experiment.seed, rollout.max_waves),
        rewards=experiment.rewards,
    )


def evaluation_work(experiment: RolloutExperiment, run: RunDirectory) -> Workload | None:
    """Held-out prompts, one completion each, judged by a stricter verifier than the one that is trained on."""
    if experiment.evaluation is None:
        return None
    return Workload(
        name="held_out",
        folder=run.held_out,
        data=load_prompts(experiment.evaluation.data),
        chat=experiment.evaluation.data.chat,
        group_size=1,
        temperature=experiment.evaluation.temperature,
        max_completion_tokens=experiment.rollout.max_completion_tokens,
        chunk_prompts=EVALUATION_CHUNK_PROMPTS,
        schedule=None,
        rewards=(RewardConfig(use="exact_match", weight=1.0),),
    )
