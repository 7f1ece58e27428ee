"""The rewards to score with: a file of `[[rewards]]` tables, a whole experiment file, or what a run was made with."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import Field, ValidationError, model_validator

from towline.jobs.experiment import RolloutExperiment
from towline.jobs.experiment_errors import describe_errors, read_toml
from towline.jobs.experiment_parts import ScoringConfig
from towline.launcher.experiment_file import ExperimentFile
from towline.launcher.preflight import raise_problems
from towline.launcher.profile_file import load_profile
from towline.launcher.reward_source import located_problems
from towline.rollout.rewards.compatible import refuse_impossible, refuse_slow_tests
from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.formula import formula
from towline.storage.config import StrictModel
from towline.storage.errors import ConfigError


class _Tables(StrictModel):
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    scoring: ScoringConfig = ScoringConfig()

    @model_validator(mode="after")
    def _rewards_go_together(self) -> "_Tables":
        refuse_impossible(self.rewards)
        refuse_slow_tests(self.rewards, self.scoring.limit_s)
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    source: str
    """Where they are from, as a message shows it."""
    tables: tuple[RewardConfig, ...]
    scoring: ScoringConfig
    max_completion_tokens: int | None
    """Of the experiment that they are part of; None: they are part of none."""

    @property
    def weights(self) -> dict[str, float]:
        return {table.part_name: table.weight for table in self.tables}

    def lines(self, code_hash: str) -> str:
        """What they are, for the head of a report."""
        return f"rewards   {self.source}, code {code_hash}\n          {formula(self.tables)}\n"

    @property
    def counts_tokens(self) -> bool:
        return any(table.counts_tokens for table in self.tables)

    def refuse_reward_models(self) -> None:
        """
        Raises:
            ConfigError: a part is a reward model, and what is scored is text.
        """
        for table in self.tables:
            if table.is_reward_model:
                raise ConfigError(
                    f"{self.source}: {table.part_name} is a reward model and reads token ids of prompt and completion, "
                    "which a run's ledger has and a text has not: name a run, or leave that part out."
                )


def read_rewards(path: Path) -> Rewards:
    """Of an experiment file only rewards and scoring are looked at: the rest may be for another machine.

    Raises:
        ConfigError: every problem of these tables, each with its line.
        InputError: a reward that does not exist.
    """
    text, raw = read_toml(path)
    is_experiment = "objective" in raw
    wanted = {key: raw[key] for key in _Tables.model_fields if key in raw} if is_experiment else raw
    context = {"folder": path.resolve().parent, "vars": cluster_variables()}
    try:
        tables = _Tables.model_validate_json(json.dumps(wanted, default=str), context=context)
    except ValidationError as error:
        raise ConfigError(describe_errors(path, text, set(), error, _Tables)) from error
    raise_problems(list(located_problems(ExperimentFile(path=path, text=text, overrides=()), tables.rewards)))
    return Rewards(
        source=path.name,
        tables=tables.rewards,
        scoring=tables.scoring,
        max_completion_tokens=_max_completion_tokens(raw) if is_experiment else None,
    )


def rewards_of(experiment: RolloutExperiment) -> Rewards:
    return Rewards(
        source="its own rewards",
        tables=experiment.rewards,
        scoring=experiment.scoring,
        max_completion_tokens=experiment.rollout.max_completion_tokens,
    )


def cluster_variables() -> dict[str, str]:
    """`${NAME}` in paths, as $TOWLINE_CLUSTER's profile has them."""
    return load_profile(None).vars if os.environ.get("TOWLINE_CLUSTER") else {}


def _max_completion_tokens(raw: Mapping[str, Any]) -> int | None:
    rollout = raw.get("rollout")
    value = cast("dict[str, object]", rollout).get("max_completion_tokens") if isinstance(rollout, dict) else None
    return value if isinstance(value, int) and value > 0 else None
