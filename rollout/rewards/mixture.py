"""The reward of an experiment: several functions, each part kept apart, and their total.

A reward function takes `(completion, gold)` and returns a number or a `Verdict`. It may be the user's own file, so
whatever it raises or returns becomes a failed part with a reason: NaN in the ledger, never a silent 0.
"""

import hashlib
import importlib
import inspect
import math
import reprlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from towline.rollout.rewards.reward_file import FileReward, choices, describe, load_file_reward
from towline.rollout.rewards.total import Term, total
from towline.rollout.rewards.verdict import Verdict
from towline.storage.errors import ConfigError
from towline.storage.records import Score, ScoreStatus

Reward = Callable[[str, str], Verdict | float]

BUILT_IN = {
    "code_tests": "towline.rollout.rewards.code_tests:grade",
    "citation": "towline.rollout.rewards.citation:grade",
    "exact_match": "towline.rollout.rewards.exact_match:grade",
    "format": "towline.rollout.rewards.format:grade",
    "math_answer": "towline.rollout.rewards.math_answer:grade",
    "normalised_match": "towline.rollout.rewards.normalised_match:grade",
    "tool_call": "towline.rollout.rewards.tool_call:grade",
}
MAX_DETAIL_CHARS = 500


@runtime_checkable
class NeedsPreparation(Protocol):
    """A built-in reward that has something to start in each process that grades."""

    def prepare(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart(Term):
    function: Reward

    def prepare(self) -> str:
        """What a process does once before it grades; says what shuts programs in, where some are run.

        Raises:
            TowlineError: it cannot grade here.
        """
        return self.function.prepare() if isinstance(self.function, NeedsPreparation) else ""


def score(
    parts: Sequence[RewardPart], completion: str, gold: str, begin: Callable[[int], None] = lambda place: None
) -> Score:
    """Ask every part, also after one has failed; the total is NaN unless all of them are OK.

    Args:
        begin: told the place of each part, from 1, before it is asked.
    """
    verdicts: dict[str, Verdict] = {}
    for place, part in enumerate(parts, start=1):
        begin(place)
        verdicts[part.name] = judge(part.function, completion, gold)
    values = {name: math.nan if verdict.value is None else verdict.value for name, verdict in verdicts.items()}
    statuses = {verdict.status for verdict in verdicts.values()}
    return Score(
        parts=values,
        part_status={name: verdict.status for name, verdict in verdicts.items()},
        part_seconds={name: verdict.seconds for name, verdict in verdicts.items()},
        total=total(parts, values),
        status=next((s for s in (ScoreStatus.FAILED, ScoreStatus.TIMEOUT) if s in statuses), ScoreStatus.OK),
        seconds=sum(verdict.seconds for verdict in verdicts.values()),
        detail="; ".join(f"{name}: {verdict.detail}" for name, verdict in verdicts.items() if verdict.detail),
    )


def judge(function: Reward, completion: str, gold: str) -> Verdict:
    """Call one reward function; nothing it raises gets past here, except what ends the process."""
    started = time.perf_counter()
    try:
        verdict = _as_verdict(function(completion, gold))
    except (Exception, SystemExit) as error:
        verdict = _failed(describe(error, _sources(function)))
    return replace(verdict, seconds=time.perf_counter() - started)


def _as_verdict(answer: object) -> Verdict:
    if isinstance(answer, Verdict):
        if answer.status != ScoreStatus.OK:
            return replace(answer, value=None, detail=answer.detail[:MAX_DETAIL_CHARS])
        return replace(_as_verdict(answer.value), detail=answer.detail[:MAX_DETAIL_CHARS])
    if isinstance(answer, Real) and math.isfinite(value := float(answer)):
        return Verdict(value=value)
    return _failed(f"returned {reprlib.repr(answer)} ({type(answer).__name__}); return a finite number or a Verdict")


def _failed(detail: str) -> Verdict:
    return Verdict(value=None, status=ScoreStatus.FAILED, detail=detail[:MAX_DETAIL_CHARS])


def load_reward(use: str, folder: Path, options: Mapping[str, Any] | None = None) -> Reward:
    """Find a reward by its built-in name, or as `path/to/file.py:function` relative to `folder`.

    Args:
        options: `RewardConfig.options`.
    """
    if ":" in use:
        return load_file_reward(use, folder)
    if use not in BUILT_IN:
        raise ConfigError(
            f"rewards.use {use!r} is not a built-in reward; {choices(use, BUILT_IN)}, or FILE.py:FUNCTION"
        )
    module, _, name = BUILT_IN[use].partition(":")
    reward = getattr(importlib.import_module(module), name)
    return reward.with_options(**options) if options else reward


def code_hash(parts: Sequence[RewardPart]) -> str:
    """Fingerprint of the code that gives the rewards, and of all but the weights that joins them.

    Of a function of ours it covers every file of this package and of the sandbox, and its options; of a user's file,
    the neighbours that it imported too.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(f"{part.rule}\n".encode())
        if isinstance(part.function, FileReward):
            digest.update(part.function.digest())
            continue
        name = getattr(part.function, "__qualname__", repr(part.function))  # an object shows its options
        digest.update(f"{part.function.__module__}:{name}\n".encode())
        for folder in (Path(__file__).parent, Path(__file__).parents[1] / "sandbox"):
            for source in sorted(folder.rglob("*.py")):
                digest.update(hashlib.blake2b(source.read_bytes()).digest())
    return digest.hexdigest()


def _sources(function: Reward) -> tuple[Path, ...]:
    """Files whose author can mend what the function raises."""
    if isinstance(function, FileReward):
        return function.sources
    return (Path(inspect.getfile(function if inspect.isroutine(function) else type(function))),)
