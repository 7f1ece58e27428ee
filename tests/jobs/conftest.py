"""A small run on disk, and what stands in for the control store and for time."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from towline.jobs.experiment import GrpoExperiment
from towline.storage.run_directory import RunDirectory, write_json

MakeExperiment = Callable[..., GrpoExperiment]


class DictStore:
    """The control store's compare-and-set, in this process."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.before_exchange = lambda: None
        self.address = "127.0.0.1:0"
        self.code: int | None = None

    def get(self, name: str) -> Any | None:
        return self.values.get(name)

    def set(self, name: str, value: Any) -> None:
        self.values[name] = value

    def exchange(self, name: str, old: Any | None, new: Any) -> bool:
        self.before_exchange()
        with self._lock:
            if self.values.get(name) != old:
                return False
            self.values[name] = new
            return True

    def poll(self) -> int | None:
        return self.code

    def close(self) -> None:
        pass


class Clock:
    """In place of a module's `time`: it goes on only while somebody sleeps, or when it is told to."""

    strftime = staticmethod(time.strftime)

    def __init__(self) -> None:
        self.now = 1000.0
        self.wall = 1.7e9

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.wall

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the supervisor and of everything that it asks."""
    clock = Clock()
    for module in ("supervisor", "member", "standstill", "stall_report", "deadline", "fleet"):
        monkeypatch.setattr(f"towline.jobs.{module}.time", clock)
    return clock


@pytest.fixture
def make_experiment(tmp_path: Path) -> MakeExperiment:
    """Of three steps with two chunks each; arguments are tables to be merged in."""

    def make(**tables: Any) -> GrpoExperiment:
        rows = [json.dumps({"prompt": f"p{row}", "answer": f"a{row}"}) + "\n" for row in range(6)]
        (tmp_path / "train.jsonl").write_text("".join(rows))
        (tmp_path / "held_out.jsonl").write_text("".join(rows[:2]))
        fields: dict[str, Any] = {
            "objective": "grpo",
            "steps": 3,
            "policy": {"model": str(tmp_path / "model")},
            "data": {"train": str(tmp_path / "train.jsonl"), "chat": False},
            "rollout": {"prompts_per_step": 4, "group_size": 2, "max_completion_tokens": 4, "chunk_prompts": 2},
            "rewards": [{"use": "exact_match", "weight": 1.0}],
            "trainer": {"learning_rate": 1e-4},
            "evaluation": {"data": {"train": str(tmp_path / "held_out.jsonl"), "chat": False}},
        }
        for name, table in tables.items():
            fields[name] = fields.get(name, {}) | table if isinstance(table, dict) else table
        return GrpoExperiment.model_validate_json(json.dumps(fields))

    return make


@pytest.fixture
def run(tmp_path: Path, make_experiment: MakeExperiment) -> RunDirectory:
    """A run folder as it is before its first attempt."""
    run = RunDirectory.create(tmp_path / "runs" / "small")
    write_json(run.config, make_experiment().model_dump(mode="json"))
    return run
