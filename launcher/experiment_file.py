"""An experiment file as the user wrote it, so that a message can point to the line to mend."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from towline.jobs.experiment import ExperimentConfig
from towline.jobs.experiment_errors import key_lines
from towline.jobs.load_experiment import load_experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFile:
    path: Path
    text: str
    overrides: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return self.path.resolve().parent

    def is_overridden(self, key: str) -> bool:
        return any(self._key(item) == key for item in self.overrides)

    def writes(self, key: str, value: str) -> bool:
        """Whether the user wrote this very value, before it was made a path."""
        given = [item.partition("=")[2].strip(" \"'") for item in self.overrides if self._key(item) == key]
        return value == (given[-1] if given else _value_at(self.text, key))

    def where(self, key: str) -> str:
        """`FILE:LINE` of a dotted key or of the innermost table around it; `-o` for one of the command line."""
        if self.is_overridden(key):
            return "-o"
        lines, parts = key_lines(self.text), key.split(".")
        known = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        return f"{self.path.name}:{next((lines[part] for part in known if part in lines), 1)}"

    @staticmethod
    def _key(override: str) -> str:
        return override.partition("=")[0].strip()


def _value_at(text: str, key: str) -> object:
    value: object = tomllib.loads(text)
    for part in key.split("."):
        value = cast("dict[str, object]", value).get(part) if isinstance(value, dict) else None
    return value


def read_experiment(
    path: Path,
    overrides: tuple[str, ...],
    variables: dict[str, str] | None = None,
    runs: Path = Path("runs"),
) -> tuple[ExperimentFile, ExperimentConfig]:
    experiment = load_experiment(path, overrides, variables, runs)
    return ExperimentFile(path=path, text=path.read_text(encoding="utf-8"), overrides=overrides), experiment
