"""Who makes progress and who stands still, by heartbeats and our own clock. Imports no torch."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

START_LIMIT_S = 600.0
"""Loading a model and forming groups shows no progress for a while."""
STARTING = ("start", "join", "load")
_SILENT_S = 4.0
"""A heartbeat comes every second, whatever the process does, as long as it is not stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    process: str
    phase: str
    stood_s: float
    limit_s: float
    is_silent: bool
    """Not even the heartbeat comes: stopped, swapped out, or its node is gone."""

    def __str__(self) -> str:
        how = "does not answer at all (stopped, or its node is gone)" if self.is_silent else "made no progress"
        return f"{how}: no progress for {self.stood_s:.0f} s in phase '{self.phase}' (limit {self.limit_s:g} s)"


@dataclass(slots=True)
class _Seen:
    count: tuple[int, int]
    """Life and beats; or life and rounds."""
    when: float


@dataclass(slots=True)
class Watch:
    """
    Args:
        stall_s: limit for a process that has started, s.
    """

    stall_s: float
    beats: dict[str, Any] = field(default_factory=dict[str, Any])
    """The latest heartbeat of each process."""
    _progress: dict[str, _Seen] = field(default_factory=dict[str, _Seen])
    _rounds: dict[str, _Seen] = field(default_factory=dict[str, _Seen])

    def look(self, beats: Mapping[str, Any]) -> None:
        self.beats = dict(beats)
        now = time.monotonic()
        for name, beat in beats.items():
            _see(self._progress, name, (beat["life"], beat["beats"]), now)
            _see(self._rounds, name, (beat["life"], beat["rounds"]), now)

    def forget(self, name: str) -> None:
        """Its process has ended; the next one begins anew."""
        for seen in (self._progress, self._rounds, self.beats):
            seen.pop(name, None)

    def stood_s(self, name: str) -> float:
        return time.monotonic() - self._progress[name].when if name in self._progress else 0.0

    def culprit(self) -> Standstill | None:
        """Of those beyond their limit the one to blame: one that is silent, else the one that stands longest.

        A stopped rank makes its peers hang in a collective at about the same time; they still send heartbeats.
        """
        standing = [self._standstill(name) for name in self._progress]
        beyond = [one for one in standing if one.stood_s > one.limit_s]
        if not beyond:
            return None
        # A silent process within its own limit may be the reason why others are beyond theirs.
        silent = [one for one in standing if one.is_silent and one.stood_s > min(one.limit_s, self.stall_s) / 2]
        return max(silent or beyond, key=lambda one: one.stood_s)

    def _standstill(self, name: str) -> Standstill:
        phase = self.beats[name]["phase"]
        return Standstill(
            process=name,
            phase=phase,
            stood_s=self.stood_s(name),
            limit_s=max(self.stall_s, START_LIMIT_S) if phase in STARTING else self.stall_s,
            is_silent=time.monotonic() - self._rounds[name].when > _SILENT_S,
        )


def _see(seen: dict[str, _Seen], name: str, count: tuple[int, int], now: float) -> None:
    if name not in seen or seen[name].count != count:
        seen[name] = _Seen(count, now)
