"""What crosses from one room to another. All token ids are the engine's own: nothing is tokenised twice."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Role = Literal["system", "user", "assistant"]


class FinishReason(IntEnum):
    STOP = 0
    """The model ended its turn."""
    LENGTH = 1
    """Cut at `max_completion_tokens`."""
    ABORTED = 2
    """Taken back by the engine or by us; never trained on."""


class ScoreStatus(IntEnum):
    OK = 0
    FAILED = 1
    """The grader raised, died or answered nonsense. Its value is NaN, never 0."""
    TIMEOUT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    row: int
    """Index of the row in its dataset, from 0."""
    text: str
    """After the template, before tokenisation."""
    answer: str
    """The gold answer, as the dataset has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    role: Role
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation to be imitated. A prompt with its completion is one of two turns."""

    row: int
    """Index of the row in its dataset, from 0."""
    turns: tuple[Turn, ...]
    """The last is the assistant's."""

    @property
    def prompt(self) -> tuple[Turn, ...]:
        """What stands before the last turn."""
        return self.turns[:-1]

    @property
    def completions(self) -> tuple[str, ...]:
        return (self.turns[-1].content,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two completions of one prompt."""

    row: int
    prompt: tuple[Turn, ...]
    """At least one; a prompt that is text is one turn of the user."""
    chosen: str
    """What the assistant says; better than `rejected`."""
    rejected: str
    margin: float | None
    """By how much, in units of the reward; None where the dataset does not say."""

    @property
    def completions(self) -> tuple[str, ...]:
        return (self.chosen, self.rejected)

    @property
    def identical_pair(self) -> bool:
        """No policy and no reward model tells the two apart: nothing is learned, and no comparison won or lost."""
        return self.chosen == self.rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledSteps:
    """A solution in steps, each judged."""

    row: int
    prompt: tuple[Turn, ...]
    steps: tuple[str, ...]
    labels: tuple[int | None, ...]
    """1: right, 0: wrong, None: not judged. One for each step, at least one of them a judgement."""

    @property
    def completions(self) -> tuple[str, ...]:
        """The steps of the one completion."""
        return self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    """`rollout_logprobs`: natural log, at the sampling temperature, one for each token id."""
    versions: NDArray[np.uint32]
    """Version of the policy that produced each token."""
    finish_reason: FinishReason
    seed: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All completions of one prompt."""

    prompt: Prompt
    prompt_token_ids: NDArray[np.int32]
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    parts: dict[str, float]
    """Reward part → value, unweighted; NaN where that part failed."""
    part_status: dict[str, ScoreStatus]
    """Reward part → what became of it; the same names as in `parts`."""
    part_seconds: dict[str, float]
    """Reward part → wall time, s; NaN where it was not measured."""
    total: float
    """Of all parts but `length`, which the trainer adds; NaN unless every part is OK."""
    status: ScoreStatus
    """The worst of the parts'."""
    seconds: float
    """Wall time of all parts together, s."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkId:
    """A piece of one step's work: the unit of leasing, sealing and scoring."""

    step: int
    wave: int
    chunk: int

    def __str__(self) -> str:
        return f"step-{self.step:06d}/wave-{self.wave}/chunk-{self.chunk:03d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOrigin:
    """Where a shard comes from: enough to say which weights wrote each token."""

    chunk: ChunkId
    branch: int
    engine: int
    attempt: int
    weight_hashes: dict[int, str]
    """Policy version → digest of the weight stream the engine had received; "" for the version loaded from disk."""
    sampling: dict[str, float | int]
    """The sampling settings that hold for every completion of the shard."""
    began: float
    """Unix time on the engine's host when the first request of the chunk was submitted, s."""
    ended: float
    """The same, when the last one finished."""
    sampling_hash: str = ""
    """Digest of the sampling settings and of the prompts; "" where it was not recorded."""
