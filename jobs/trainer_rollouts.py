"""A step's scored rollouts, for the trainer: live from the engines, or again from the ledger."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import torch.distributed as dist

from towline.jobs.agreement import Agreement
from towline.jobs.asked_waves import ask_for_waves
from towline.jobs.failed_scores import FailedScores
from towline.jobs.length_reward import LengthReward, length_reward
from towline.jobs.recorded_wave import RecordedWave, read_wave
from towline.jobs.role import Role
from towline.jobs.work import Workload
from towline.rollout.score_timings import ScoreTimings
from towline.storage.errors import LedgerError
from towline.storage.lineage import Lineage, fits, is_off_policy
from towline.storage.records import ChunkId, ShardOrigin
from towline.storage.set_aside import set_aside
from towline.trainer.dynamic_sampling import StepBatch, step_batch, wants_another_wave
from towline.trainer.rollout_batch import ScoredGroup
from towline.trainer.rollout_steps import Metrics


@dataclass(slots=True)
class LiveRollouts:
    """Wave after wave, rank 0 waits until every chunk is scored and tells the others; then each rank reads the shards
    and comes to the same answer whether the step needs another wave. Rank 0 asks for it."""

    role: Role
    work: Workload
    agreement: Agreement
    lineage: Lineage
    failed: FailedScores
    metrics: Metrics = field(default_factory=Metrics)
    """Of the step read last."""
    _length: LengthReward | None = field(init=False)
    _waited_for_scores_s: float = 0.0

    def __post_init__(self) -> None:
        self._length = length_reward(self.work, self.role.heartbeat.beat)

    def read(self, step: int) -> StepBatch | None:
        is_first = dist.get_rank() == 0
        self._waited_for_scores_s = 0.0
        if is_first:
            self.role.store.set("training", step)
        waves: list[RecordedWave] = []
        while _needs_another(self.work, waves):
            if is_first and waves:
                ask_for_waves(self.role.store, self.work, step, len(waves) + 1)
            if self._wait_for(step, len(waves)) == "stop":
                return None
            waves.append(_read_wave(self.work, self._length, step, len(waves)))
        self.failed.judge(step, _drawn(waves))
        self.metrics = step_metrics(waves)
        if self._length is not None:
            since = self._length.since(step)
            self.metrics |= {"reward/length_on": float(since is not None)}
            if is_first and since == step:
                print(f"step {step}: the rest of the reward has converged: {self._length.term.name} counts", flush=True)
        if is_first:
            origins = [origin for wave in waves for origin in wave.origins]
            self.metrics |= {
                "rollouts/off_policy": self._judge(origins),
                "seconds/wait_scores": self._waited_for_scores_s,
            }
        return _batch(self.work, waves)

    def _wait_for(self, step: int, wave: int) -> str:
        """ "train" when the wave is complete, "stop" when the run is to stop first."""
        chunks = [chunk for chunk, _ in self.work.chunks(step, wave)]
        num_scored = num_sealed = 0
        all_sealed = math.inf

        def decide() -> str | None:
            """Chunk after chunk."""
            nonlocal num_scored, num_sealed, all_sealed
            if self.role.is_stopping:
                return "stop"
            num_scored += self._num_known("scored", chunks[num_scored:])
            num_sealed += self._num_known("sealed", chunks[num_sealed:])
            if num_sealed == len(chunks):
                all_sealed = min(all_sealed, time.monotonic())
            if num_scored < len(chunks):
                return None
            self._waited_for_scores_s += max(0.0, time.monotonic() - all_sealed)
            return "train"

        return self.agreement.wait("wait for rollouts", decide)

    def _num_known(self, what: str, chunks: Sequence[ChunkId]) -> int:
        """How many in a row are "sealed" or "scored"."""
        known = takewhile(lambda chunk: self.role.store.get(f"{self.work.name}/{what}/{chunk}") is not None, chunks)
        return sum(1 for _ in known)

    def _judge(self, origins: list[tuple[Path, ShardOrigin]]) -> float:
        """The fraction of shards that another branch's policy wrote.

        Raises:
            LedgerError: a shard was written by weights that this run does not have; it is set aside.
        """
        for path, origin in origins:
            reason = fits(
                self.lineage,
                origin,
                sampling_hash=self.work.sampling_hash,
                max_staleness=self.role.circle.rollout.max_staleness,
            )
            if reason is not None:
                set_aside(self.role.run, path, reason, self.role.attempt)
                raise LedgerError(
                    f"{path} does not fit this run and is set aside: {reason}. A resume generates it again."
                )
        return sum(is_off_policy(self.lineage, origin) for _, origin in origins) / len(origins)


@dataclass(slots=True)
class RecordedRollouts:
    """The same steps again, from the ledger alone: how many waves a step had follows from what is in them."""

    work: Workload
    failed: FailedScores
    _length: LengthReward | None = field(init=False)

    def __post_init__(self) -> None:
        self._length = length_reward(self.work)

    def read(self, step: int) -> StepBatch:
        waves: list[RecordedWave] = []
        while _needs_another(self.work, waves):
            waves.append(_read_wave(self.work, self._length, step, len(waves)))
        self.failed.judge(step, _drawn(waves))
        return _batch(self.work, waves)


def step_metrics(waves: Sequence[RecordedWave]) -> Metrics:
    """How long generation and scoring took, and what was lost. One wave follows the other, so their times add up."""
    return {
        "seconds/generate": sum(wave.generation_s for wave in waves),
        "seconds/score": sum(wave.scoring_s for wave in waves),
        "rollouts/lost": sum(wave.num_lost for wave in waves) / sum(wave.num_prompts for wave in waves),
        **_score_times(waves),
    }


def _read_wave(work: Workload, length: LengthReward | None, step: int, wave: int) -> RecordedWave:
    found = read_wave(work, step, wave)
    return found if length is None else length.joined(step, found)


def _score_times(waves: Sequence[RecordedWave]) -> Metrics:
    timings = ScoreTimings()
    for scored in _drawn(waves):
        for score in scored.scores:
            timings.add(score, "", "")
    times: Metrics = {}
    for part, latency in timings.latencies().items():
        times[f"scoring/p50_s/{part}"] = latency.p50_s
        times[f"scoring/p99_s/{part}"] = latency.p99_s
        times[f"scoring/max_s/{part}"] = latency.max_s
    return times


def _needs_another(work: Workload, waves: Sequence[RecordedWave]) -> bool:
    groups = [wave.groups for wave in waves]
    return wants_another_wave(groups, num_wanted=work.prompts_per_step, max_waves=work.max_waves)


def _drawn(waves: Sequence[RecordedWave]) -> list[ScoredGroup]:
    return [scored for wave in waves for scored in wave.groups]


def _batch(work: Workload, waves: Sequence[RecordedWave]) -> StepBatch:
    groups = [wave.groups for wave in waves]
    return step_batch(groups, num_wanted=work.prompts_per_step, max_waves=work.max_waves)
