"""What each start of a run had and how it ended: what guards an allocation against a run that goes on in vain.

One row when an attempt begins and one when it ends, in the run's `attempts.jsonl`. An attempt that was killed has no
second row; it counts until its last sign of life.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from towline.storage.checkpoints import newest_step
from towline.storage.run_directory import RunDirectory, read_jsonl

ALIVE_EVERY_S = 10.0
MAX_IN_VAIN = 2
"""Attempts in a row that brought no new checkpoint before a submission ends."""
MIN_LEFT_S = 60.0
"""An attempt that may not last longer only starts and ends."""
MAX_NODE_FAILURES = 2
"""After which a node is not asked for again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    number: int
    job: str
    submission: int
    """Which `towline submit` or `resume` of the run it belongs to."""
    nodes: tuple[str, ...]
    began: float
    checkpoint: int | None
    """The one it began from."""
    ended: float | None = None
    outcome: str = ""
    """ "done", "limit", "preempted", "stopped", "budget", "node lost", "failed"; "" if it was killed."""
    failed_nodes: tuple[str, ...] = ()
    step_s: float = 0.0
    """Longest training and publication of a step, s."""
    save_s: float = 0.0
    """Longest save, s."""

    @property
    def node_hours(self) -> float:
        return len(self.nodes) * max(0.0, (self.ended or self.began) - self.began) / 3600


@dataclass(slots=True)
class AttemptBook:
    run: RunDirectory
    _alive: float = field(default=0.0)

    def rows(self) -> list[AttemptRow]:
        """In order, killed ones with the time of their last sign of life as their end."""
        merged: dict[int, dict[str, Any]] = {}
        for row in read_jsonl(self.run.attempts_file):
            merged.setdefault(row["number"], {}).update(row)
        return [self._row(number, values) for number, values in sorted(merged.items())]

    def begin(self, number: int, job: str, submission: int, nodes: Sequence[str]) -> None:
        row = AttemptRow(number=number, job=job, submission=submission, nodes=tuple(nodes), began=time.time(),
                         checkpoint=newest_step(self.run.checkpoints))  # fmt: skip
        self._append({name: value for name, value in asdict(row).items() if value not in (None, "", ())})
        self._alive_file(number).touch()

    def alive(self, number: int) -> None:
        """Called often; leaves a sign now and then."""
        if time.monotonic() - self._alive >= ALIVE_EVERY_S:
            self._alive = time.monotonic()
            os.utime(self._alive_file(number))

    def end(self, number: int, outcome: str, *, step_s: float = 0.0, save_s: float = 0.0) -> None:
        """
        Args:
            step_s, save_s: what was measured, for the next attempt to go by.
        """
        row = {"number": number, "ended": time.time(), "outcome": outcome, "step_s": step_s, "save_s": save_s}
        self._append(row)

    def measured(self) -> tuple[float, float]:
        """Step and save of the latest attempt that measured both, s; 0 without one."""
        measured = [(row.step_s, row.save_s) for row in self.rows() if row.step_s and row.save_s]
        return measured[-1] if measured else (0.0, 0.0)

    def note_failed_nodes(self, number: int, nodes: Sequence[str]) -> None:
        known = next((row.failed_nodes for row in self.rows() if row.number == number), ())
        if new := [node for node in nodes if node not in known]:
            self._append({"number": number, "failed_nodes": [*known, *new]})

    def node_hours(self) -> float:
        return sum(row.node_hours for row in self.rows())

    def left_s(self, max_node_hours: float | None, num_nodes: int) -> float | None:
        """How long so many nodes may still be used; None without a limit."""
        return None if max_node_hours is None else (max_node_hours - self.node_hours()) * 3600 / num_nodes

    def in_vain(self, submission: int) -> int:
        """How many of its latest attempts ended without a checkpoint that their successor could begin from."""
        rows = [row for row in self.rows() if row.submission == submission]
        newest = newest_step(self.run.checkpoints)
        return sum(1 for _ in _while_equal([row.checkpoint for row in reversed(rows)], newest))

    def unreliable_nodes(self) -> tuple[str, ...]:
        counts: dict[str, int] = {}
        for row in self.rows():
            for node in row.failed_nodes:
                counts[node] = counts.get(node, 0) + 1
        return tuple(sorted(node for node, count in counts.items() if count >= MAX_NODE_FAILURES))

    def num_timeouts(self) -> int:
        return sum(row.outcome == "limit" for row in self.rows())

    def _row(self, number: int, values: Mapping[str, Any]) -> AttemptRow:
        ended = values.get("ended") or (self._last_sign(number) if "outcome" not in values else None)
        return _ROW.validate_python({"checkpoint": None, **values, "ended": ended})

    def _last_sign(self, number: int) -> float | None:
        file = self._alive_file(number)
        return file.stat().st_mtime if file.exists() else None

    def _alive_file(self, number: int) -> Path:
        return self.run.logs(number) / "alive"

    def _append(self, row: Mapping[str, Any]) -> None:
        with self.run.attempts_file.open("a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


_ROW = TypeAdapter(AttemptRow)


def _while_equal(values: Sequence[int | None], wanted: int | None) -> list[int | None]:
    equal: list[int | None] = []
    for value in values:
        if value != wanted:
            break
        equal.append(value)
    return equal
