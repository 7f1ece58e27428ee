"""Every shipped cluster profile, and the script that follows from it for one fixed experiment.

After a change that is meant, write the scripts of tests/launcher/golden anew and look at their difference:

    TOWLINE_GOLDEN=write .venv/bin/pytest tests/launcher/test_shipped_profiles.py
"""

import itertools
import os
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from towline.jobs.slurm.profile import ClusterProfile
from towline.launcher.profile_file import SHIPPED, load_profile
from towline.launcher.submit import prepare, show_script

GOLDEN = Path(__file__).with_name("golden")
PROFILES = sorted(path.stem for path in SHIPPED.glob("*.toml"))
NODES = "nodes={trainer = 2, rollout = 2, max_node_hours = 100}"


def test_there_are_some_to_copy() -> None:
    assert {"dev", "template", "h100-infiniband", "a100-modules"} <= set(PROFILES)


@pytest.mark.parametrize("name", PROFILES)
def test_it_is_called_after_its_file(name: str) -> None:
    assert load_profile(name).name == name


def test_the_template_has_every_field_there_is() -> None:
    raw = tomllib.loads((SHIPPED / "template.toml").read_text())
    assert set(keys_of(raw)) == set(fields_of(ClusterProfile))


def test_the_template_explains_every_field() -> None:
    """By a comment on the line before; in a table of options or variables, before the table."""
    lines = (SHIPPED / "template.toml").read_text().splitlines()
    explained = {after.split(" ")[0].strip("[]") for line, after in itertools.pairwise(lines) if line.startswith("#")}
    names = {key.rpartition(".")[2] for key in fields_of(ClusterProfile)} - {"sbatch", "srun", "env", "software"}
    assert names - {"folders"} <= explained
    assert "software.env" in explained


@pytest.mark.parametrize("smoke", [False, True], ids=["job", "smoke"])
@pytest.mark.parametrize("name", PROFILES)
def test_the_script_is_the_golden_one(
    name: str, smoke: bool, project, slurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("towline.launcher.prompt_preflight.can_tokenize", lambda: False)
    monkeypatch.setenv("USER", "ada")
    prepared = prepare(project.file, name, ("run.name=golden", NODES), smoke=smoke)
    assert show_script(prepared) == 0
    text = independent(capsys.readouterr().out, prepared.run.root)
    golden = GOLDEN / f"{name}{'-smoke' if smoke else ''}.sh"
    if os.environ.get("TOWLINE_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_no_golden_script_is_left_over() -> None:
    names = {path.stem.removesuffix("-smoke") for path in GOLDEN.glob("*.sh")}
    assert names == set(PROFILES)


def independent(script: str, run: Path) -> str:
    """The script without what differs from machine to machine."""
    return script.replace(str(run), "/runs/golden").replace(shlex.quote(sys.executable), "/venv/bin/python")


def keys_of(raw: dict[str, Any], model: type[BaseModel] = ClusterProfile) -> Iterator[str]:
    for key, value in raw.items():
        yield key
        if (inner := model_of(model, key)) is not None:
            yield from (f"{key}.{below}" for below in keys_of(value, inner))


def fields_of(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        key = field.alias or name
        yield key
        if (inner := model_of(model, key)) is not None:
            yield from (f"{key}.{below}" for below in fields_of(inner))


def model_of(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    field = next((field for name, field in model.model_fields.items() if key in (name, field.alias)), None)
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
