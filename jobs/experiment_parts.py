"""The tables of an experiment that are not of one room alone."""

from pathlib import Path
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import Field

from towline.storage.config import ConfigPath, StrictModel
from towline.storage.data_config import DataConfig
from towline.storage.example_config import DemonstrationData, PreferenceData, StepData

Examples = TypeVar("Examples", DemonstrationData, PreferenceData, StepData)


class RunConfig(StrictModel):
    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's folder; default: the file's name and the month, day and time of the start."""
    root: ConfigPath = Path("runs")
    """Folder in which runs are made, relative to the working folder when left out."""
    stall_s: float = Field(default=600.0, gt=0)
    """Seconds without any progress after which a process counts as hung and the run ends."""
    sync_timeout_s: float = Field(default=300.0, gt=0)
    """Limit for each part of a publication of the weights, s. An engine silent for longer is left out of it."""
    lease_s: float = Field(default=120.0, gt=0)
    """Seconds without any progress after which an engine's chunks are given to others."""
    max_restarts: int = Field(default=3, ge=0)
    """How often each engine and scorer is started again before the run ends."""


class EvaluationConfig(StrictModel):
    data: DataConfig
    """Held-out prompts."""
    every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; there is always one before the first step and one after the last."""
    temperature: float = Field(default=0.0, ge=0)


class ExampleEvaluationConfig(StrictModel, Generic[Examples]):
    data: Examples
    """Held-out examples of the same kind."""
    every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; there is always one before the first step and one after the last."""


class TrainerLocalConfig(StrictModel):
    """Used by `towline run` on one machine; a cluster's profile says this for `towline submit`."""

    trainer_ranks: int = Field(default=1, ge=1)
    trainer_threads: int = Field(default=1, ge=1)
    """CPU threads of each trainer rank."""


class LocalConfig(TrainerLocalConfig):
    engines: int = Field(default=1, ge=1)
    scorers: int = Field(default=1, ge=1)
    """Worker processes that grade completions."""
    engine_threads: int = Field(default=1, ge=1)
    """CPU threads of each engine."""


class TrainerNodesConfig(StrictModel):
    """Used by `towline submit`, ignored by `towline run`."""

    trainer: int = Field(default=1, ge=1)
    max_node_hours: float | None = Field(default=None, gt=0)
    """Of the whole run, all its attempts together; then it stops with a checkpoint."""

    @property
    def counts(self) -> dict[str, int]:
        """Nodes of each group, in the order of a het job's components."""
        return {"trainer": self.trainer, "rollout": 0, "scorer": 0}


class NodesConfig(TrainerNodesConfig):
    rollout: int = Field(default=1, ge=1)
    scorer: Annotated[int, Field(ge=0)] | Literal["rollout"] = 0
    """Nodes that grade. 0: the trainer's first node does it; "rollout": every rollout node does, beside its engines."""

    @property
    def counts(self) -> dict[str, int]:
        scorer = 0 if self.scorer == "rollout" else self.scorer
        return {"trainer": self.trainer, "rollout": self.rollout, "scorer": scorer}

    @property
    def num_scorers(self) -> int:
        return self.rollout if self.scorer == "rollout" else max(1, self.scorer)


class ScoringConfig(StrictModel):
    limit_s: float = Field(default=5.0, gt=0)
    """Wall time after which one completion's grading is killed, s."""
    memory_gib: float = Field(default=2.0, gt=0)
    """Address space of a worker beyond what the loaded rewards take, GiB; a completion that needs more fails."""
    max_failed: float = Field(default=0.1, ge=0, le=1)
    """Share of completions without a score above which the run stops: of the last ten steps, and surely above it."""
