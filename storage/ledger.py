"""The ledger: what was generated and how it was scored, one sealed file per chunk and one per scoring.

A shard appears whole under its final name, is never replaced, and is refused when it is not what was sealed.
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from towline.storage.columns import Columns, offsets, pack_texts, read_columns, unpack_texts, write_columns
from towline.storage.errors import LedgerError
from towline.storage.ledger_schema import SCORES, SHARD
from towline.storage.publish import publish_first
from towline.storage.records import (
    ChunkId,
    Completion,
    FinishReason,
    Prompt,
    RolloutGroup,
    Score,
    ScoreStatus,
    ShardOrigin,
)

_STEP = re.compile(r"step-(\d{6,})")
_CHUNK = re.compile(r"wave-(\d+)/chunk-(\d{3,})\.h5")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    groups: tuple[RolloutGroup, ...]
    origin: ShardOrigin
    digest: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoreSheet:
    """Scores of every completion of a shard, in its order."""

    scores: tuple[Score, ...]
    weights: dict[str, float]
    code_hash: str
    shard_digest: str
    began: float
    """Unix time on the scorer's host, s."""
    ended: float
    isolation: str = ""
    """What shut in the programs that a reward ran; empty where none did."""


def seal_shard(path: Path, groups: tuple[RolloutGroup, ...], origin: ShardOrigin) -> str:
    """Write and publish a shard; return its digest. Raises FileExistsError when another writer was first."""
    completions = [completion for group in groups for completion in group.completions]
    for completion in completions:
        lengths = (len(completion.token_ids), len(completion.logprobs), len(completion.versions))
        if len(set(lengths)) > 1:
            raise LedgerError(f"{path}: a completion has {lengths} token ids, log-probs and versions; expected equals.")
    prompt_text, prompt_text_offsets = pack_texts([group.prompt.text for group in groups])
    answer, answer_offsets = pack_texts([group.prompt.answer for group in groups])
    text, text_offsets = pack_texts([completion.text for completion in completions])
    columns = {
        "prompt/row": np.array([group.prompt.row for group in groups]),
        "prompt/token_ids": _join(group.prompt_token_ids for group in groups),
        "prompt/token_offsets": offsets([len(group.prompt_token_ids) for group in groups]),
        "prompt/text": prompt_text,
        "prompt/text_offsets": prompt_text_offsets,
        "prompt/answer": answer,
        "prompt/answer_offsets": answer_offsets,
        "completion/group": np.array([index for index, group in enumerate(groups) for _ in group.completions]),
        "completion/token_ids": _join(completion.token_ids for completion in completions),
        "completion/logprobs": _join(completion.logprobs for completion in completions),
        "completion/versions": _join(completion.versions for completion in completions),
        "completion/token_offsets": offsets([len(completion.token_ids) for completion in completions]),
        "completion/finish_reason": np.array([completion.finish_reason for completion in completions]),
        "completion/seed": np.array([completion.seed for completion in completions]),
        "completion/text": text,
        "completion/text_offsets": text_offsets,
    }
    with publish_first(path) as temporary:
        return write_columns(temporary, "rollouts", SHARD, columns, {"origin": dataclasses.asdict(origin)})


def read_shard(path: Path) -> Shard:
    columns, attributes, digest = read_columns(path, "rollouts", SHARD)
    texts = unpack_texts(columns["completion/text"], columns["completion/text_offsets"])
    bounds = columns["completion/token_offsets"]
    completions = [
        Completion(
            token_ids=columns["completion/token_ids"][start:stop],
            logprobs=columns["completion/logprobs"][start:stop],
            versions=columns["completion/versions"][start:stop],
            finish_reason=FinishReason(int(reason)),
            seed=int(seed),
            text=text,
        )
        for start, stop, reason, seed, text in zip(
            bounds, bounds[1:], columns["completion/finish_reason"], columns["completion/seed"], texts, strict=False
        )
    ]
    prompt_texts = unpack_texts(columns["prompt/text"], columns["prompt/text_offsets"])
    answers = unpack_texts(columns["prompt/answer"], columns["prompt/answer_offsets"])
    prompt_bounds = columns["prompt/token_offsets"]
    members = np.searchsorted(columns["completion/group"], np.arange(len(prompt_texts) + 1))
    groups = tuple(
        RolloutGroup(
            prompt=Prompt(row=int(columns["prompt/row"][index]), text=prompt_texts[index], answer=answers[index]),
            prompt_token_ids=columns["prompt/token_ids"][prompt_bounds[index] : prompt_bounds[index + 1]],
            completions=tuple(completions[members[index] : members[index + 1]]),
        )
        for index in range(len(prompt_texts))
    )
    return Shard(groups=groups, origin=_origin(attributes["origin"]), digest=digest)


def scores_path(shard: Path, again: str | None = None) -> Path:
    """
    Args:
        again: name of a later scoring, whose scores lie beside the first; None: the scores that are trained on.
    """
    return shard.with_suffix(".scores.h5" if again is None else f".scores-{again}.h5")


def seal_scores(shard: Path, sheet: ScoreSheet, again: str | None = None) -> None:
    """Write and publish the scores of `shard` beside it. Raises FileExistsError when it is scored already."""
    path, names = scores_path(shard, again), sorted(sheet.weights)
    for score in sheet.scores:
        for parts in (score.parts, score.part_status, score.part_seconds):
            if sorted(parts) != names:
                raise LedgerError(f"{path}: a score has the parts {sorted(parts)}, expected {names}.")
    detail, detail_offsets = pack_texts([score.detail for score in sheet.scores])
    columns = {
        "parts": np.array([score.parts[name] for score in sheet.scores for name in names]),
        "part_status": np.array([score.part_status[name] for score in sheet.scores for name in names]),
        "part_seconds": np.array([score.part_seconds[name] for score in sheet.scores for name in names]),
        "total": np.array([score.total for score in sheet.scores]),
        "status": np.array([score.status for score in sheet.scores]),
        "seconds": np.array([score.seconds for score in sheet.scores]),
        "detail": detail,
        "detail_offsets": detail_offsets,
    }
    names_of_attributes = ("weights", "code_hash", "shard_digest", "began", "ended", "isolation")
    attributes = {name: getattr(sheet, name) for name in names_of_attributes}
    with publish_first(path) as temporary:
        write_columns(temporary, "scores", SCORES, columns, attributes)


def read_scores(shard: Path, again: str | None = None) -> ScoreSheet:
    columns, attributes, _ = read_columns(scores_path(shard, again), "scores", SCORES)
    if "part_status" not in columns:
        columns |= _parts_of_version_1(columns)
    names, num_completions = sorted(attributes["weights"]), len(columns["total"])
    values, statuses, times = (
        columns[name].reshape(num_completions, len(names)) for name in ("parts", "part_status", "part_seconds")
    )
    details = unpack_texts(columns["detail"], columns["detail_offsets"])
    scores = tuple(
        Score(
            parts=dict(zip(names, map(float, values[row]), strict=True)),
            part_status=dict(zip(names, map(ScoreStatus, statuses[row].tolist()), strict=True)),
            part_seconds=dict(zip(names, map(float, times[row]), strict=True)),
            total=float(columns["total"][row]),
            status=ScoreStatus(int(columns["status"][row])),
            seconds=float(columns["seconds"][row]),
            detail=details[row],
        )
        for row in range(num_completions)
    )
    return ScoreSheet(scores=scores, **attributes)


def _parts_of_version_1(columns: Columns) -> Columns:
    """It kept one status and one time for all parts; a part without a value is what has that status."""
    num_parts = len(columns["parts"]) // max(1, len(columns["total"]))
    statuses = np.where(np.isnan(columns["parts"]), np.repeat(columns["status"], num_parts), ScoreStatus.OK)
    return {"part_status": statuses, "part_seconds": np.full(len(statuses), np.nan)}


def read_scored_shard(path: Path) -> tuple[Shard, ScoreSheet]:
    """Read a shard with its scores, and make sure that they belong together."""
    shard, sheet = read_shard(path), read_scores(path)
    num_completions = sum(len(group.completions) for group in shard.groups)
    if sheet.shard_digest != shard.digest or len(sheet.scores) != num_completions:
        raise LedgerError(f"{scores_path(path)} was made for another shard than {path.name}. Score it again.")
    return shard, sheet


def sealed_chunks(rollouts: Path, step: int) -> list[Path]:
    """Shards of a step in canonical order."""
    places = {
        (int(match.group(1)), int(match.group(2))): path
        for path in (rollouts / f"step-{step:06d}").glob("wave-*/chunk-*.h5")
        if (match := _CHUNK.fullmatch(f"{path.parent.name}/{path.name}"))
    }
    return [places[place] for place in sorted(places)]


def sealed_steps(rollouts: Path) -> list[int]:
    """Steps with at least one shard, ascending."""
    steps = [int(match.group(1)) for path in rollouts.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return sorted(step for step in steps if sealed_chunks(rollouts, step))


def _join(arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
    pieces = list(arrays)
    return np.concatenate(pieces) if pieces else np.zeros(0)


def _origin(fields: dict[str, Any]) -> ShardOrigin:
    hashes = {int(version): digest for version, digest in fields["weight_hashes"].items()}
    values: dict[str, Any] = {**fields, "chunk": ChunkId(**fields["chunk"]), "weight_hashes": hashes}
    return ShardOrigin(**values)
