"""What is said of a loss of pairs, and `[trainer]` of iterated DPO, whose pairs the policy makes itself."""

from typing import Literal

from pydantic import Field, model_validator

from towline.trainer.config import EngineConfig


class PreferenceConfig(EngineConfig):
    beta: float = Field(default=0.1, gt=0)
    """How strongly the policy is held to the reference; 0.05 to 0.5 is usual."""
    loss: Literal["sigmoid", "ipo"] = "sigmoid"
    length_normalised: bool = False
    """Compare log-probs a token instead of those of whole completions; IPO always does."""
    label_smoothing: float = Field(default=0.0, ge=0, le=0.5)
    """Probability that a preference is the wrong way round."""
    nll_weight: float = Field(default=0.0, ge=0)
    """Of the chosen completions' negative log-likelihood a token, added to the loss: where the two of a pair differ
    in few tokens, DPO alone makes both less likely."""

    @model_validator(mode="after")
    def _smoothing_has_a_meaning(self) -> "PreferenceConfig":
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError('label_smoothing belongs to loss = "sigmoid": leave it out')
        return self


class IteratedDpoConfig(PreferenceConfig):
    """A round is an outer step: the policy generates, its completions are ranked, and it learns from pairs of them."""

    reference: Literal["round", "start"] = "round"
    """The policy as the round began, which needs no second model; or the model that the run began with."""
    pairs_per_prompt: int = Field(default=1, ge=1)
    """At most so many of a group: its best with its worst completion, its second best with its second worst, …"""
    inner_epochs: int = Field(default=1, ge=1)
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps per inner epoch; the round's pairs are divided among them."""

    @property
    def has_reference_model(self) -> bool:
        """Whether the reference is a model beside the policy."""
        return self.reference == "start"

    def last_refresh(self, step: int) -> int | None:
        """As of GRPO: a model that is the reference never becomes another."""
        return None
