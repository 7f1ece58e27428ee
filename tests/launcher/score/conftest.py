"""A user's reward and its file of `[[rewards]]`, and lines of completions."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from towline.launcher.cli import command

OWN = """
import time

def grade(completion, gold):
    if completion == "raise":
        raise ValueError("no such answer")
    while completion == "loop":
        time.sleep(0.01)
    return 1.0 if gold in completion else 0.0
"""
REWARDS = """\
[[rewards]]
use = "math_answer"
weight = 1.0

[[rewards]]
use = "own.py:grade"
name = "own"
weight = 0.5

[scoring]
limit_s = 0.5
max_failed = 1.0
"""


@dataclass(frozen=True)
class Desk:
    """A folder to score in."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def rewards(self) -> Path:
        return self.folder / "rewards.toml"

    def write(self, name: str, *lines: dict[str, Any] | str) -> Path:
        path = self.folder / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    def score(self, *arguments: object, code: int = 0) -> str:
        """What `towline score` prints; on stderr where it refuses."""
        given = [str(argument) for argument in arguments]
        rewards = [] if "--rewards" in given else ["--rewards", str(self.rewards)]
        self.capsys.readouterr()
        assert command(["score", *given, *rewards, "--workers", "2"]) == code
        said = self.capsys.readouterr()
        assert (said.out if code == 2 else said.err) == ""
        return said.err if code == 2 else said.out

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*"))


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Desk:
    desk = Desk(tmp_path / "desk", capsys)
    desk.folder.mkdir()
    (desk.folder / "own.py").write_text(OWN)
    desk.rewards.write_text(REWARDS)
    monkeypatch.chdir(desk.folder)
    return desk


@pytest.fixture(name="read_json")
def _read_json() -> Callable[[Path], list[Any]]:
    return lambda path: [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
