"""Everything of two finished runs that must be equal bit for bit when both are deterministic."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from towline.storage.ledger import read_scored_shard, sealed_chunks, sealed_steps

_OF_THE_CLOCK = ("seconds", "speed/", "memory/", "scoring/", "tripwire/scoring")
_OF_AN_ATTEMPT = ("check/split_", "check/still_")
"""Measured where an attempt starts."""


def differences(one: Path, other: Path, *, without: tuple[str, ...] = ("evaluations",)) -> list[str]:
    """What differs between two run folders: metrics, evaluations, ledger, newest checkpoint.

    Args:
        without: what the runs may both lack.
    """
    parts = {
        "metrics": _rows,
        "evaluations": lambda run: _rows(run, "evaluations.jsonl"),
        "ledger": _ledger,
        "checkpoint": _checkpoint,
    }
    found: list[str] = []
    for name, read in parts.items():
        mine, theirs = read(one), read(other)
        assert mine or name in without, f"{one} has no {name}"
        found += [f"{name}: {key}" for key in sorted(mine.keys() | theirs.keys()) if mine.get(key) != theirs.get(key)]
    return found


def _rows(run: Path, name: str = "metrics.jsonl") -> dict[str, dict[str, Any]]:
    path = run / name
    lines = path.read_text().splitlines() if path.exists() else []
    return {
        str(number): {
            key: value
            for key, value in json.loads(line).items()
            if not key.startswith((*_OF_THE_CLOCK, *_OF_AN_ATTEMPT))
        }
        for number, line in enumerate(lines)
    }


def _ledger(run: Path) -> dict[str, str]:
    folder = run / "rollouts"
    paths = [path for step in sealed_steps(folder) for path in sealed_chunks(folder, step)]
    return {str(path.relative_to(run)): _shard(path) for path in paths}


def _shard(path: Path) -> str:
    shard, sheet = read_scored_shard(path)
    hasher = hashlib.sha256(repr((shard.origin.branch, sorted(shard.origin.weight_hashes.items()))).encode())
    for group in shard.groups:
        hasher.update(repr(group.prompt).encode())
        for completion in group.completions:
            for values in (completion.token_ids, completion.logprobs, completion.versions):
                hasher.update(values.tobytes())
    hasher.update(repr([(score.total, score.status) for score in sheet.scores]).encode())
    return hasher.hexdigest()


def _checkpoint(run: Path) -> dict[str, str]:
    """Policy, optimiser state and random state of every rank, tensor by tensor."""
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    found = {"step": newest.name}
    for path in sorted(newest.rglob("*")):
        name = str(path.relative_to(newest))
        if path.suffix == ".pt":
            leaves = dict(_leaves(torch.load(path, weights_only=False), name))
            found |= {key: digest for key, digest in leaves.items()}
        elif path.is_file() and path.name != "complete.json":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        yield (
            name,
            hashlib.sha256(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest(),
        )
    elif isinstance(value, np.ndarray):
        yield name, hashlib.sha256(value.tobytes()).hexdigest()
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _leaves(inner, f"{name}/{number}")
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from _leaves(vars(value), name)
    else:
        yield name, repr(value)
