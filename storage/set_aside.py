"""Files of the ledger that may not be read are moved aside and listed with the reason. Nothing is deleted.

`aside/` mirrors the run folder, with a number in each name: rollouts/…/chunk-001.h5 → aside/rollouts/…/chunk-001.1.h5,
its scores beside it as chunk-001.1.scores.h5. `aside/aside.jsonl` has one line for each. A process killed between the
move and the line leaves a file without a reason; it is listed all the same.
"""

import contextlib
import itertools
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from towline.storage.errors import LedgerError
from towline.storage.ledger import (
    ScoreSheet,
    Shard,
    read_scored_shard,
    read_shard,
    scores_path,
    sealed_chunks,
    sealed_steps,
)
from towline.storage.lineage import other_sampling
from towline.storage.publish import leftovers, move_first, remove_leftovers
from towline.storage.run_directory import RunDirectory

UNKNOWN = "not recorded: the process that put it here was killed"
DUPLICATE = "a late duplicate: another engine sealed this chunk first"
_SCORES = ".scores.h5"
_STEP = re.compile(r"step-(\d{6,})")
_NUMBER = re.compile(r"\.\d+(?=(\.scores)?\.h5$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What is left of a shard and its scores."""

    shard: Shard | None
    """None: damaged."""
    sheet: ScoreSheet | None
    """None: damaged, or not scored yet."""
    damage: tuple[Path, str] | None
    """The file, shard or scores, that cannot be trusted, and why, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    path: str
    """Where the file was, relative to the run folder."""
    aside: str
    """Where it is, relative to the run folder."""
    reason: str
    attempt: int | None
    """None: not recorded."""
    when: float | None
    """Unix time, s; None: not recorded."""


def set_aside(run: RunDirectory, path: Path, reason: str, attempt: int) -> Path | None:
    """Move a shard with its scores, or a score file alone, out of `rollouts` or `held_out`, and list it.

    Return its new path; None when the file is gone already: another process set it aside, and listed it.
    """
    place = _move(run, path)
    if place is None:
        return None
    if not _is_scores(path):
        _move_along(run, scores_path(path), scores_path(place))
    _list(run, _entry(run, path, place, reason, attempt))
    return place


def aside_path(run: RunDirectory, path: Path) -> Path:
    """A free place for what cannot be `path`, such as a duplicate that its writer seals there with `seal_shard`; that
    raises FileExistsError when the place was taken meanwhile: ask again."""
    return next(place for place in _places(run, path) if not (_exists(place) or _exists(_companion(place))))


def note_duplicate(run: RunDirectory, path: Path, aside: Path, attempt: int) -> None:
    """List a shard that its writer sealed at `aside`, because `path` was taken."""
    _list(run, _entry(run, path, aside, DUPLICATE, attempt))


def list_aside(run: RunDirectory) -> list[SetAside]:
    """What was set aside, oldest first; then files that lie in `aside` without a line, by name."""
    listed = [SetAside(**row) for row in _rows(run.aside_list)]
    known = {entry.aside for entry in listed}
    files = sorted(run.aside.glob("*/step-*/wave-*/chunk-*.h5"))
    unlisted = [file for file in files if _relative(run, file) not in known and not _goes_along(file)]
    return listed + [
        SetAside(path=_original(run, file), aside=_relative(run, file), reason=UNKNOWN, attempt=None, when=None)
        for file in unlisted
    ]


def repair(
    run: RunDirectory,
    *,
    from_step: int,
    attempt: int,
    sampling_hash: str,
    code_hash: str | None = None,
    folder: Path | None = None,
) -> list[SetAside]:
    """Set aside what an attempt that goes on at `from_step` could not use; return what was set aside, in order.

    Damaged shards, those in the place of another chunk and those sampled with other settings or data go with their
    scores. Damaged scores, those of another shard and those of other reward code go alone: the shard is scored again.
    Half-written files are removed. Only for whoever knows that no writer is alive in the run folder.

    Args:
        sampling_hash: what a shard sampled today would carry; "" is compared with nothing.
        code_hash: of the reward code; None: not compared.
        folder: `run.rollouts` (default) or `run.held_out`.
    """
    folder = run.rollouts if folder is None else folder
    remove_leftovers(folder)
    remove_leftovers(run.aside)
    done: list[SetAside] = []
    for path, reason in _unusable(folder, from_step, sampling_hash, code_hash):
        place = set_aside(run, path, reason, attempt)
        if place is not None:
            done.append(_entry(run, path, place, reason, attempt))
    return done


def run_leftovers(run: RunDirectory) -> list[Path]:
    """Half-written files of the ledger: of writers at work, or of killed ones."""
    return [path for folder in (run.rollouts, run.held_out, run.aside) for path in leftovers(folder)]


def examine(folder: Path, path: Path) -> Examined:
    """Read the shard at `path`, in its place under `folder`, with its scores if it has any."""
    try:
        shard = read_shard(path)
    except LedgerError as error:
        return Examined(shard=None, sheet=None, damage=(path, _one_line(error, path)))
    if path != folder / f"{shard.origin.chunk}.h5":
        return Examined(shard=None, sheet=None, damage=(path, f"it holds the chunk {shard.origin.chunk}"))
    scores = scores_path(path)
    if not _exists(scores):
        return Examined(shard=shard, sheet=None, damage=None)
    try:
        _, sheet = read_scored_shard(path)
    except LedgerError as error:
        return Examined(shard=shard, sheet=None, damage=(scores, _one_line(error, scores)))
    return Examined(shard=shard, sheet=sheet, damage=None)


def orphans(folder: Path, from_step: int = 0) -> list[Path]:
    """Scores whose shard is gone, by name."""
    found = sorted(folder.glob(f"step-*/wave-*/chunk-*{_SCORES}"))
    return [path for path in found if _step(path) >= from_step and not _exists(_companion(path))]


def _unusable(folder: Path, from_step: int, sampling_hash: str, code_hash: str | None) -> Iterator[tuple[Path, str]]:
    for step in (step for step in sealed_steps(folder) if step >= from_step):
        for path in sealed_chunks(folder, step):
            found = examine(folder, path)
            if found.shard is not None and (reason := other_sampling(found.shard.origin, sampling_hash)) is not None:
                yield path, reason
            elif found.damage is not None:
                yield found.damage
            elif code_hash is not None and found.sheet is not None and found.sheet.code_hash != code_hash:
                yield scores_path(path), f"scored by other reward code: hash {found.sheet.code_hash}"
    for path in orphans(folder, from_step):
        yield path, "its shard is gone"


def _move(run: RunDirectory, path: Path) -> Path | None:
    """Move one file to the first number that is free; None when it is gone.

    Two processes that move the same file try the same numbers in the same order, so the later one meets the file
    itself under its new name, and only one of them takes away the old name.
    """
    for place in _places(run, path):
        if _exists(_companion(place)) and not _exists(place):
            continue
        try:
            move_first(path, place)
        except FileExistsError:
            continue
        except FileNotFoundError:
            return None
        return place
    raise AssertionError("the numbers do not end")


def _move_along(run: RunDirectory, scores: Path, place: Path) -> None:
    """Move the scores of a shard to the shard's own number, or to another where that one was taken meanwhile."""
    try:
        move_first(scores, place)
    except FileNotFoundError:
        return
    except FileExistsError:
        _move(run, scores)


def _places(run: RunDirectory, path: Path) -> Iterator[Path]:
    """chunk-001.h5 → chunk-001.1.h5, chunk-001.2.h5 …; chunk-001.scores.h5 → chunk-001.1.scores.h5 …"""
    suffix = _SCORES if _is_scores(path) else path.suffix
    folder = run.aside / path.relative_to(run.root).parent
    return (folder / f"{path.name.removesuffix(suffix)}.{number}{suffix}" for number in itertools.count(1))


def _companion(path: Path) -> Path:
    """The scores of a shard, the shard of scores."""
    return path.with_name(f"{path.name.removesuffix(_SCORES)}.h5") if _is_scores(path) else scores_path(path)


def _is_scores(path: Path) -> bool:
    return path.name.endswith(_SCORES)


def _goes_along(path: Path) -> bool:
    """Whether it is the scores of a shard that lies beside them: one line is for both."""
    return _is_scores(path) and _exists(_companion(path))


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _step(path: Path) -> int:
    match = _STEP.fullmatch(path.parent.parent.name)
    return int(match.group(1)) if match else -1


def _relative(run: RunDirectory, path: Path) -> str:
    return path.relative_to(run.root).as_posix()


def _original(run: RunDirectory, aside: Path) -> str:
    return _NUMBER.sub("", aside.relative_to(run.aside).as_posix())


def _one_line(error: LedgerError, path: Path) -> str:
    """The file is named beside the reason."""
    text = " ".join(str(error).split())
    return text.removeprefix(str(path)).removeprefix(":").strip()


def _entry(run: RunDirectory, path: Path, aside: Path, reason: str, attempt: int) -> SetAside:
    return SetAside(
        path=_relative(run, path), aside=_relative(run, aside), reason=reason, attempt=attempt, when=time.time()
    )


def _list(run: RunDirectory, entry: SetAside) -> None:
    """Add a line in one write, as several processes may do at once."""
    run.aside.mkdir(exist_ok=True)
    with run.aside_list.open("ab+", buffering=0) as file:
        file.write(_line_end(file) + json.dumps(asdict(entry)).encode() + b"\n")
        os.fsync(file.fileno())


def _line_end(file: Any) -> bytes:
    """Closes the line that a killed writer left unfinished; it stays, for others may be writing."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return b""
    file.seek(size - 1)
    return b"" if file.read(1) == b"\n" else b"\n"


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        # What a killed writer left is no whole line; its file shows up as one without a reason.
        with contextlib.suppress(json.JSONDecodeError):
            yield json.loads(line)
