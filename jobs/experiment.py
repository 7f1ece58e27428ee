"""The whole experiment: one TOML file, composed of the rooms' own configs."""

import json
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from towline.jobs.experiment_errors import describe_errors, read_toml
from towline.rollout.config import RolloutConfig
from towline.rollout.rewards.compatible import refuse_impossible, refuse_slow_tests
from towline.rollout.rewards.config import RewardConfig
from towline.storage.config import ConfigPath, StrictModel
from towline.storage.data_config import DataConfig
from towline.storage.errors import ConfigError
from towline.trainer.config import PolicyConfig, TrainerConfig


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


class LocalConfig(StrictModel):
    """Used by `towline run` on one machine; a cluster's profile says this for `towline submit`."""

    trainer_ranks: int = Field(default=1, ge=1)
    engines: int = Field(default=1, ge=1)
    scorers: int = Field(default=1, ge=1)
    """Worker processes that grade completions."""
    trainer_threads: int = Field(default=1, ge=1)
    """CPU threads of each trainer rank."""
    engine_threads: int = Field(default=1, ge=1)
    """CPU threads of each engine."""


class NodesConfig(StrictModel):
    """Used by `towline submit`, ignored by `towline run`."""

    trainer: int = Field(default=1, ge=1)
    rollout: int = Field(default=1, ge=1)
    scorer: Annotated[int, Field(ge=0)] | Literal["rollout"] = 0
    """Nodes that grade. 0: the trainer's first node does it; "rollout": every rollout node does, beside its engines."""
    max_node_hours: float | None = Field(default=None, gt=0)
    """Of the whole run, all its attempts together; then it stops with a checkpoint."""

    @property
    def counts(self) -> dict[str, int]:
        """Nodes of each group, in the order of a het job's components."""
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


class ExperimentConfig(StrictModel):
    objective: Literal["grpo"]
    seed: int = Field(default=0, ge=0)
    steps: int = Field(ge=1)
    """Outer steps."""
    deterministic: bool = False
    """The same bits in every run, killed and resumed or not: float32 on CPU, one thread a process, no staleness."""
    policy: PolicyConfig
    data: DataConfig
    rollout: RolloutConfig
    rewards: tuple[RewardConfig, ...] = Field(min_length=1)
    trainer: TrainerConfig
    run: RunConfig = RunConfig()
    scoring: ScoringConfig = ScoringConfig()
    evaluation: EvaluationConfig | None = None
    local: LocalConfig = LocalConfig()
    nodes: NodesConfig | None = None

    @model_validator(mode="after")
    def _minibatches_divide(self) -> "ExperimentConfig":
        if self.trainer.minibatches > self.rollout.prompts_per_step:
            raise ValueError(
                f"trainer.minibatches ({self.trainer.minibatches}) must not exceed rollout.prompts_per_step "
                f"({self.rollout.prompts_per_step}): every optimiser step needs at least one group"
            )
        return self

    @model_validator(mode="after")
    def _rewards_go_together(self) -> "ExperimentConfig":
        refuse_impossible(self.rewards)
        refuse_slow_tests(self.rewards, self.scoring.limit_s)
        return self

    @model_validator(mode="after")
    def _token_penalties_have_a_use(self) -> "ExperimentConfig":
        limit = self.rollout.max_completion_tokens
        for reward in self.rewards:
            if (reward.cache_tokens or 0) > limit:
                raise ValueError(
                    f"rewards: cache_tokens ({reward.cache_tokens}) of {reward.part_name} must be at most "
                    f"rollout.max_completion_tokens ({limit}): the penalty begins so many tokens before it"
                )
            if (reward.target_tokens or 0) >= limit:
                raise ValueError(
                    f"rewards: target_tokens ({reward.target_tokens}) of {reward.part_name} must be below "
                    f"rollout.max_completion_tokens ({limit}): no completion is longer"
                )
        if self.trainer.masks_truncated and any(reward.is_overlong and reward.weight for reward in self.rewards):
            raise ValueError(
                "trainer.masks_truncated leaves out the very completions that the reward overlong punishes most: they "
                "would only make the others of their group look better. Set masks_truncated = false (DAPO's recipe), "
                "or overlong's weight to 0, which records it"
            )
        return self

    @model_validator(mode="after")
    def _waves_leave_the_baseline_alone(self) -> "ExperimentConfig":
        if self.rollout.max_waves > 1 and self.trainer.baseline == "batch":
            raise ValueError(
                f"rollout.max_waves = {self.rollout.max_waves} leaves out groups of equal rewards, and "
                'trainer.baseline = "batch" compares with the mean of the step: those groups teach something there, '
                "and a mean without the easiest and the hardest prompts is not that of the prompts that were drawn. "
                'Set baseline = "group" or max_waves = 1'
            )
        return self

    @model_validator(mode="after")
    def _deterministic_is_possible(self) -> "ExperimentConfig":
        wanted = {
            "rollout.max_staleness": (self.rollout.max_staleness, 0),
            "rollout.precision": (self.rollout.precision, "float32"),
            "trainer.precision": (self.trainer.precision, "float32"),
            "local.trainer_threads": (self.local.trainer_threads, 1),
            "local.engine_threads": (self.local.engine_threads, 1),
        }
        if self.deterministic and (wrong := {name: pair for name, pair in wanted.items() if pair[0] != pair[1]}):
            name, (found, needed) = next(iter(wrong.items()))
            raise ValueError(f"deterministic = true needs {name} = {json.dumps(needed)}, found {json.dumps(found)}")
        return self

    @model_validator(mode="after")
    def _int8_is_not_sharded(self) -> "ExperimentConfig":
        trainer = self.trainer
        if self.policy.reference == "int8" and trainer.zero_stage == 3 and trainer.kl_beta > 0:
            raise ValueError(
                'policy.reference = "int8" does not go with trainer.zero_stage = 3: ZeRO-3 cuts weights into shards '
                "and transposes them in every linear layer, which torchao's int8 weights cannot do; set "
                'policy.reference = "offloaded", which is sharded too, or trainer.zero_stage <= 2'
            )
        return self

    @model_validator(mode="after")
    def _adapters_have_their_base_at_hand(self) -> "ExperimentConfig":
        if self.trainer.lora is not None and self.policy.reference != "on_device" and self.trainer.kl_beta > 0:
            raise ValueError(
                f'policy.reference = "{self.policy.reference}" does not go with [trainer.lora]: the reference is the '
                "policy without its adapters, and takes no memory of its own. Leave policy.reference out"
            )
        return self

    @property
    def num_scorers(self) -> int:
        """Scorer processes, each with `local.scorers` workers."""
        return self.nodes.num_scorers if self.nodes else 1

    @property
    def model_folder(self) -> Path:
        return Path(self.policy.model)

    @property
    def chunk_prompts(self) -> int:
        """Prompts of a chunk: an engine should find more than one chunk a step, so that none waits idle."""
        if self.rollout.chunk_prompts is not None:
            return self.rollout.chunk_prompts
        return max(1, -(-self.rollout.prompts_per_step // (2 * self.local.engines)))


def load_experiment(
    path: Path,
    overrides: tuple[str, ...] = (),
    variables: dict[str, str] | None = None,
    runs: Path = Path("runs"),
) -> ExperimentConfig:
    """Read an experiment file and apply `key.path=value` overrides, values being TOML (a bare word is a string).

    Args:
        variables: `${NAME}` in paths.
        runs: run.root where the file says none, relative to the working folder.

    Raises:
        ConfigError: every problem of the file, one per line, each with its line number, field and remedy.
    """
    text, raw = read_toml(path)
    overridden = {_override(raw, item) for item in overrides}
    # A path given on the command line is relative to where the command was typed.
    folders = {"folder": path.resolve().parent, "vars": variables or {}}
    try:
        raw.setdefault("run", {}).setdefault("root", str(runs.resolve()))
        _anchor_overrides(raw, overridden)
        # Through JSON: strict, yet arrays become tuples and strings become paths.
        return ExperimentConfig.model_validate_json(json.dumps(raw, default=str), context=folders)
    except ValidationError as error:
        raise ConfigError(describe_errors(path, text, overridden, error, ExperimentConfig)) from error


def override_experiment(experiment: ExperimentConfig, overrides: tuple[str, ...]) -> ExperimentConfig:
    """A resolved experiment with `key.path=value` overrides; paths are relative to the working folder."""
    raw = experiment.model_dump(mode="json")
    overridden = {_override(raw, item) for item in overrides}
    try:
        _anchor_overrides(raw, overridden)
        return ExperimentConfig.model_validate_json(json.dumps(raw), context={"folder": Path.cwd(), "vars": {}})
    except ValidationError as error:
        raise ConfigError(describe_errors(Path("experiment"), "", overridden, error, ExperimentConfig)) from error


def _override(raw: dict[str, Any], item: str) -> str:
    key, separator, value = item.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"-o {item}: expected KEY=VALUE, for example -o trainer.learning_rate=1e-6.")
    *tables, name = key.strip().split(".")
    place: Any = raw
    for table in tables:
        if not isinstance(place.setdefault(table, {}), dict):
            raise ConfigError(f"-o {item}: {table} is not a table.")
        place = place[table]
    place[name] = _toml_value(value.strip())
    return key.strip()


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


_PATH_FIELDS = ("run.root", "policy.model", "data.train", "data.template", "evaluation.data.train")


def _anchor_overrides(raw: dict[str, Any], overridden: set[str]) -> None:
    """Make paths from the command line absolute before the file's folder is put in front of relative ones."""
    for key in overridden.intersection(_PATH_FIELDS):
        *tables, name = key.split(".")
        place = raw
        for table in tables:
            place = place[table]
        value = place[name]
        if isinstance(value, str) and "${" not in value and not value.startswith(("reasoning_gym:", "~")):
            place[name] = str(Path(value).resolve())
