"""Where the time went between a job's start and its first lease, and how much of it was ours.

Ours is what comes on top of Slurm's own start, of imports and of loading models: the supervisor's work, the rendezvous
of the ranks, and bringing trainer and engines together. Clocks of several hosts are compared: they agree to
milliseconds where time is kept by NTP.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

LOADED = "wait for the trainer"
"""Phase of an engine that has its weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestones:
    """Of the supervisor, s since the epoch."""

    began: float
    """The batch step's process, or `towline run`."""
    supervised: float
    """Its imports are done and the supervisor begins."""
    asked: float
    """The control store is asked for."""
    stored: float
    """The control store answers."""
    launched: float
    """Every process was asked for."""


def has_started(beats: Mapping[str, Any]) -> bool:
    """And every rank and engine has told how it came there: their heartbeats come a second later or earlier."""
    phases = {name: beat["phases"] for name, beat in beats.items()}
    loaded = {"trainer": "loaded", "rollout": LOADED}
    kinds = {name: name.partition(".")[0] for name in phases}
    return "ready" in phases.get("trainer.0", {}) and all(
        loaded[kind] in phases[name] for name, kind in kinds.items() if kind in loaded
    )


def start_up_lines(milestones: Milestones, beats: Mapping[str, Any]) -> Iterator[str]:
    """
    Args:
        beats: the latest heartbeat of each process, once `has_started`.
    """
    phases = {name: beat["phases"] for name, beat in beats.items()}
    trainers = [times for name, times in phases.items() if name.startswith("trainer.")]
    engines = [times for name, times in phases.items() if name.startswith("rollout.")]
    ready = phases["trainer.0"]["ready"]
    begun = max(times["began"] for times in [*trainers, *engines])
    loaded = max(*(times["loaded"] for times in trainers), *(times[LOADED] for times in engines), 0.0)
    # The last rank to come waits for nobody: its time in `join` is the rendezvous itself.
    meeting = min(times["load"] - times["join"] for times in trainers)
    own = {
        "supervisor": (milestones.asked - milestones.supervised) + (milestones.launched - milestones.stored),
        "ranks meet": meeting,
        "trainer and engines meet": ready - loaded,
    }
    parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in own.items())
    yield f"start-up {ready - milestones.began:.1f} s, of which {sum(own.values()):.1f} s are Towline's own: {parts}"
    imported, stored = milestones.supervised - milestones.began, milestones.stored - milestones.asked
    yield (
        f"  imports of the supervisor {imported:.1f} s, control store (imports torch) {stored:.1f} s, processes begin "
        f"in {max(0.0, begun - milestones.launched):.1f} s"
    )
    yield f"  trainer   imports {_longest(trainers, 'began', 'start')}   loads {_longest(trainers, 'load', 'loaded')}"
    if engines:
        yield f"  engines   imports {_longest(engines, 'began', 'start')}   load {_longest(engines, 'load', LOADED)}"


def _longest(times: list[dict[str, float]], start: str, end: str) -> str:
    return f"{max(one[end] - one[start] for one in times):.1f} s"
