"""`[trainer]` of the objectives that learn from given examples: SFT, reward models, DPO."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from towline.storage.config import StrictModel
from towline.trainer.config import EngineConfig
from towline.trainer.preference_config import PreferenceConfig


class SupervisedConfig(EngineConfig):
    batch_size: int = Field(ge=1)
    """Examples of one optimiser step, over all ranks and micro-batches: demonstrations, or pairs."""
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    """Of the learning rate after the warm-up, counted in optimiser steps; linear and cosine end at 0."""


class SftConfig(SupervisedConfig):
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of each token's target that is spread evenly over the vocabulary."""


class RewardModelConfig(SupervisedConfig):
    head: Literal["outcome"] = "outcome"
    """One score a completion, from pairs (Bradley-Terry). With head = "process" it is one a step, from judged steps."""
    centring: float = Field(default=0.0, ge=0)
    """Weight of (chosen + rejected score)^2, which draws scores to a mean of 0."""


class StepRewardConfig(SupervisedConfig):
    head: Literal["process"]
    """One score a step, from steps that were judged right or wrong."""


class SweepConfig(StrictModel):
    beta: tuple[Annotated[float, Field(gt=0)], ...] = Field(min_length=2)
    """Values of trainer.beta, of which each gets a run of its own; their held-out win rates are compared."""

    @field_validator("beta")
    @classmethod
    def _all_different(cls, beta: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(beta)) < len(beta):
            raise ValueError("names a value twice")
        return beta


class DpoConfig(SupervisedConfig, PreferenceConfig):
    """DPO on given pairs."""
