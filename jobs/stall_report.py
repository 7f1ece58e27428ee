"""What everybody did when a run stood still: phases, Python stacks, the last collective, and what was waiting."""

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from towline.jobs.processes import Attempt
from towline.jobs.standstill import Standstill
from towline.storage.ledger import scores_path, sealed_chunks, sealed_steps

_STACKS_WITHIN_S = 1.0
_COLLECTIVE = re.compile(r'File ".*(?:torch/distributed|deepspeed/comm)/.*", line \d+ in (\w+)')


def ask_for_stacks(
    beats: Mapping[str, Any], log: Callable[[str], Path], elsewhere: Callable[[int], None] = lambda number: None
) -> dict[str, int]:
    """Let every process write its stacks to its log; return where each log ended before, in bytes.

    Args:
        log: of a process, by its name.
        elsewhere: sends a signal to the processes that are not on this host.
    """
    asked: dict[str, int] = {}
    for name, beat in beats.items():
        end = log(name).stat().st_size if log(name).is_file() else 0
        if beat["host"] == socket.gethostname():
            try:
                os.kill(beat["pid"], signal.SIGUSR1)
            except ProcessLookupError:
                continue
        asked[name] = end
    if any(beat["host"] != socket.gethostname() for beat in beats.values()):
        elsewhere(signal.SIGUSR1)
    time.sleep(_STACKS_WITHIN_S)
    return asked


def write_stall_report(
    path: Path, culprit: Standstill, beats: Mapping[str, Any], asked: Mapping[str, int], attempt: Attempt
) -> None:
    """Append the report; one attempt may have several."""
    with path.open("a") as report:
        for line in _lines(culprit, beats, asked, attempt):
            report.write(line + "\n")


def _lines(culprit: Standstill, beats: Mapping[str, Any], asked: Mapping[str, int], attempt: Attempt) -> Iterator[str]:
    yield f"{time.strftime('%Y-%m-%d %H:%M:%S')} {culprit.process} {culprit}"
    yield ""
    stacks = {name: _stack_after(attempt.run.log(attempt.number, name), end) for name, end in asked.items()}
    for name, beat in beats.items():
        collective = next((match[1] for line in stacks.get(name, []) if (match := _COLLECTIVE.search(line))), None)
        yield (
            f"{name:12} {beat['phase']} since {beat['phase_s']} s   pid {beat['pid']} on {beat['host']}"
            f"{f'   in collective {collective}' if collective else ''}"
        )
    yield ""
    yield from _queues(attempt)
    for name, stack in stacks.items():
        yield ""
        yield f"stack of {name} (innermost first)"
        yield from stack or ["  none: it does not answer signals"]
    yield ""


def _queues(attempt: Attempt) -> Iterator[str]:
    """Of the newest step with shards: what is sealed and what is scored."""
    for folder in (attempt.run.rollouts, attempt.run.held_out):
        steps = sealed_steps(folder)
        if steps:
            chunks = sealed_chunks(folder, steps[-1])
            scored = sum(scores_path(chunk).exists() for chunk in chunks)
            yield f"{folder.name}: step {steps[-1]} has {len(chunks)} sealed chunks, {scored} of them scored"


def _stack_after(log: Path, end: int) -> list[str]:
    """The main thread's frames of the last dump that faulthandler wrote after byte `end`: an older one tells of
    another standstill."""
    if not log.is_file():
        return []
    lines = log.read_bytes()[end:].decode(errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("Current thread")]
    if not starts:
        return []
    frames: list[str] = []
    for line in lines[starts[-1] + 1 :]:
        if not line.startswith("  File"):
            break
        frames.append(line)
    return frames
