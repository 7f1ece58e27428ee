"""Find and read a cluster profile."""

import difflib
import json
import os
import tomllib
from pathlib import Path

from pydantic import ValidationError

import towline
from towline.jobs.experiment_errors import describe_errors, read_toml
from towline.jobs.slurm.profile import ClusterProfile
from towline.storage.errors import ConfigError, InputError

SHIPPED = Path(towline.__file__).parent / "clusters"


def load_profile(name: str | None) -> ClusterProfile:
    """
    Args:
        name: of a profile, or its file; default: $TOWLINE_CLUSTER.

    Raises:
        InputError: there is no such profile, or none was named.
        ConfigError: every problem of the file, each with its line.
    """
    path = find_profile(name)
    text, raw = read_toml(path)
    try:
        return ClusterProfile.model_validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        raise ConfigError(describe_errors(path, text, set(), error, ClusterProfile)) from error


def find_profile(name: str | None) -> Path:
    name = name or os.environ.get("TOWLINE_CLUSTER")
    if not name:
        raise InputError(
            f"no cluster was named: --cluster NAME, or set TOWLINE_CLUSTER. Known: {', '.join(known_profiles())}."
        )
    if name.endswith(".toml") or os.sep in name:
        if not Path(name).is_file():
            raise InputError(f"--cluster {name}: no such file.")
        return Path(name)
    for folder in _folders():
        if (path := folder / f"{name}.toml").is_file() and is_profile(path):
            return path
    near = difflib.get_close_matches(name, known_profiles(), n=1)
    hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known_profiles())}."
    places = ", ".join(str(folder) for folder in _folders())
    raise InputError(f"--cluster {name}: no {name}.toml in {places}. {hint}")


def known_profiles() -> list[str]:
    found = [path.stem for folder in _folders() for path in sorted(folder.glob("*.toml")) if is_profile(path)]
    return list(dict.fromkeys(found))


def is_profile(path: Path) -> bool:
    """The working folder may hold experiments too, which have an objective."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True  # whatever is wrong with it is told when it is read
    return "objective" not in raw


def _folders() -> list[Path]:
    """Searched in this order."""
    named = [Path(folder) for folder in os.environ.get("TOWLINE_CLUSTERS", "").split(os.pathsep) if folder]
    return [Path(), *named, Path.home() / ".config" / "towline", SHIPPED]
