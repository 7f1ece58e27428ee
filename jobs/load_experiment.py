"""An experiment from its TOML file, with what the command line changes, or from the run folder."""

import json
import tomllib
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from towline.jobs.experiment import (
    DpoExperiment,
    ExperimentConfig,
    GrpoExperiment,
    IteratedDpoExperiment,
    RewardModelExperiment,
    SftExperiment,
    StepRewardExperiment,
)
from towline.jobs.experiment_errors import describe_errors, key_lines, read_toml
from towline.storage.errors import ConfigError

T = TypeVar("T", bound=ExperimentConfig)
OBJECTIVES: dict[str, type[ExperimentConfig]] = {
    "sft": SftExperiment,
    "reward_model": RewardModelExperiment,
    "dpo": DpoExperiment,
    "grpo": GrpoExperiment,
}


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
    kind = _kind(path, text, overridden, raw)
    # A path given on the command line is relative to where the command was typed.
    folders = {"folder": path.resolve().parent, "vars": variables or {}}
    try:
        raw.setdefault("run", {}).setdefault("root", str(runs.resolve()))
        _anchor_overrides(raw, overridden)
        # Through JSON: strict, yet arrays become tuples and strings become paths.
        return kind.model_validate_json(json.dumps(raw, default=str), context=folders)
    except ValidationError as error:
        raise ConfigError(describe_errors(path, text, overridden, error, kind)) from error


def override_experiment(experiment: T, overrides: tuple[str, ...]) -> T:
    """A resolved experiment with `key.path=value` overrides; paths are relative to the working folder."""
    raw, kind = experiment.model_dump(mode="json"), type(experiment)
    overridden = {_override(raw, item) for item in overrides}
    try:
        _anchor_overrides(raw, overridden)
        return kind.model_validate_json(json.dumps(raw), context={"folder": Path.cwd(), "vars": {}})
    except ValidationError as error:
        raise ConfigError(describe_errors(Path("experiment"), "", overridden, error, kind)) from error


def recorded_experiment(text: str) -> ExperimentConfig:
    """The resolved experiment that a run folder keeps, from its JSON."""
    return _class_of(json.loads(text)).model_validate_json(text)


def _kind(path: Path, text: str, overridden: set[str], raw: dict[str, Any]) -> type[ExperimentConfig]:
    """Which fields there are depends on the objective, so that is read first."""
    found, expected = raw.get("objective"), ", ".join(map(json.dumps, OBJECTIVES))
    if isinstance(found, str) and found in OBJECTIVES:
        return _class_of(raw)
    line = key_lines(text).get("objective", 1)
    where = "-o" if "objective" in overridden else f"{path.name}:{line}"
    if found is None:
        raise ConfigError(f"{where}: objective is missing; expected one of {expected}.")
    raise ConfigError(f"{where}: objective: expected one of {expected} (found {found!r}).")


def _class_of(raw: dict[str, Any]) -> type[ExperimentConfig]:
    """A reward model's data are pairs, or judged steps, as its head says; DPO's are given, or generated."""
    trainer: Any = raw.get("trainer")
    is_of_steps = isinstance(trainer, dict) and cast(dict[str, Any], trainer).get("head") == "process"
    if raw["objective"] == "reward_model" and is_of_steps:
        return StepRewardExperiment
    if raw["objective"] == "dpo" and ("rollout" in raw or "rewards" in raw):
        return IteratedDpoExperiment
    return OBJECTIVES[raw["objective"]]


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


_PATH_FIELDS = (
    "run.root", "policy.model", "policy.reference_tables", "data.train", "data.template", "evaluation.data.train",
    "evaluation.data.template",
)  # fmt: skip


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
