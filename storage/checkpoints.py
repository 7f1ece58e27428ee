"""What a checkpoint says of itself, which checkpoints are whole, which to keep. Writing weights is the trainer's.

A step folder counts once it holds `complete.json`: the training state, and size and digest of every other file.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from towline.storage.errors import CheckpointError, ModelError
from towline.storage.publish import fsync
from towline.storage.run_directory import write_json

_NAME = re.compile(r"step-(\d{6,})")
_COMPLETE = "complete.json"
_IDENTITY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """What a checkpoint knows besides weights, optimiser moments and random numbers."""

    step: int
    """The next outer step: the data cursor."""
    wave: int
    """The next wave of that step."""
    branch: int
    version: int
    """Policy version that the weights have."""
    stream_digest: str
    """Digest of the weight stream published as that version; empty when nobody was published to."""
    seed: int
    data: str
    """Identity of dataset and schedule: what makes a step number mean the same prompts."""
    reference: str
    """What the reference policy is: the `model_identity` of a folder, the step of its last refresh, whether int8."""
    kl_beta: float
    ranks: int
    zero_stage: int
    precision: str
    optimizer: dict[str, float | str | list[float]]
    """Settings that give the optimiser's moments their meaning, by their name in [trainer]."""
    lora: str = ""
    """Settings of the adapters; empty where the weights themselves are trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    state: TrainingState
    files: dict[str, FileRecord]
    """By path relative to the step folder."""


_MARK: TypeAdapter[_Mark] = TypeAdapter(_Mark)


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps with a whole checkpoint, ascending. One that was cut short has no completion mark and is not listed."""
    return [step for step in _steps(folder) if _is_complete(folder, step)]


def newest_step(folder: Path, *, at_most: int | None = None) -> int | None:
    steps = [step for step in complete_steps(folder) if at_most is None or step <= at_most]
    return steps[-1] if steps else None


# --- writing -----------------------------------------------------------------------------------------------------


def list_files(folder: Path, step: int) -> list[str]:
    """Files of a checkpoint in writing, relative to its folder, largest first so that shares come out even."""
    path = checkpoint_path(folder, step)
    files = [file for file in path.rglob("*") if file.is_file() and file.name != _COMPLETE]
    files.sort(key=lambda file: (-file.stat().st_size, str(file)))
    return [file.relative_to(path).as_posix() for file in files]


def seal_files(folder: Path, step: int, names: Iterable[str]) -> dict[str, FileRecord]:
    """Bring files to the disk and record what they hold. Every file of the checkpoint must be sealed by somebody."""
    path = checkpoint_path(folder, step)
    records: dict[str, FileRecord] = {}
    for name in names:
        fsync(path / name)
        records[name] = FileRecord(bytes=(path / name).stat().st_size, digest=_digest(path / name))
    return records


def mark_complete(folder: Path, step: int, state: TrainingState, files: Mapping[str, FileRecord]) -> None:
    """Written last, after every rank has written and sealed its part."""
    path = checkpoint_path(folder, step)
    for place in (*(place for place in path.rglob("*") if place.is_dir()), path, folder):
        fsync(place)
    write_json(path / _COMPLETE, asdict(_Mark(state=state, files=dict(files))))


def remove_incomplete(folder: Path, step: int) -> None:
    """Clear what a dead writer left of this step, so that old and new files cannot mix."""
    path = checkpoint_path(folder, step)
    if path.is_dir() and not _is_complete(folder, step):
        shutil.rmtree(path)


def remove(folder: Path, step: int) -> None:
    # The mark goes first: a removal that is cut short leaves nothing that looks whole.
    (checkpoint_path(folder, step) / _COMPLETE).unlink(missing_ok=True)
    remove_incomplete(folder, step)


def retain(folder: Path, keep: int, is_pinned: Callable[[int], bool] = lambda step: False) -> list[int]:
    """Remove all but the newest `keep` complete checkpoints and the pinned ones; return what was removed.

    Unfinished ones older than the newest complete one go too: nobody writes or reads them any more.
    """
    complete = complete_steps(folder)
    for step in _steps(folder):
        if complete and step < complete[-1]:
            remove_incomplete(folder, step)
    removed = [step for step in complete[: max(0, len(complete) - keep)] if not is_pinned(step)]
    for step in removed:
        remove(folder, step)
    return removed


# --- reading -----------------------------------------------------------------------------------------------------


def read_state(folder: Path, step: int) -> TrainingState:
    """Raises CheckpointError when the step has no whole checkpoint, or its mark cannot be read."""
    return _read_mark(folder, step).state


def differences(saved: TrainingState, present: TrainingState) -> list[str]:
    """One text for each part that going on would reset or mismatch: its name, both values, how to mend it.

    A different number of ranks is none: the state can be cut anew. Nor are `branch` and `stream_digest`, which a
    resume decides and checks after it has loaded.
    """
    texts = [
        _difference(part, getattr(saved, name), getattr(present, name), remedy)
        for name, (part, remedy) in _COMPARED.items()
    ]
    for name in sorted({*saved.optimizer, *present.optimizer}):
        then, now = saved.optimizer.get(name), present.optimizer.get(name)
        texts.append(_difference(f"optimiser state ({name})", then, now, f"set trainer.{name} to the checkpoint's"))
    return [text for text in texts if text is not None]


def verify_files(folder: Path, step: int, *, part: int = 0, parts: int = 1) -> list[str]:
    """Problems with every `parts`-th file, from `part` on: it is missing, or its size or content has changed.

    Raises:
        CheckpointError: there is no whole checkpoint to verify.
    """
    files = _read_mark(folder, step).files
    largest_first = sorted(files, key=lambda name: (-files[name].bytes, name))
    path = checkpoint_path(folder, step)
    problems = (_file_problem(path / name, files[name]) for name in largest_first[part::parts])
    return [problem for problem in problems if problem is not None]


def model_identity(folder: Path) -> str:
    """A cheap fingerprint of a model folder: config.json, and name, size, first and last MiB of each weight file.

    Raises:
        ModelError: the folder has no weight files.
    """
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not weights:
        raise ModelError(f"{folder} holds no weights: expected *.safetensors or *.bin. Name a Hugging Face folder.")
    fingerprint = hashlib.blake2b(digest_size=16)
    config = folder / "config.json"
    fingerprint.update(config.read_bytes() if config.is_file() else b"")
    for file in weights:
        size = file.stat().st_size
        fingerprint.update(f"\n{file.name} {size}\n".encode())
        with file.open("rb") as stream:
            fingerprint.update(stream.read(_IDENTITY_BYTES))
            stream.seek(max(0, size - _IDENTITY_BYTES))
            fingerprint.update(stream.read(_IDENTITY_BYTES))
    return fingerprint.hexdigest()


_COMPARED: dict[str, tuple[str, str]] = {
    "step": ("data cursor (step)", "load the checkpoint of the step to go on with"),
    "wave": ("data cursor (wave)", "load the checkpoint of the step to go on with"),
    "data": ("data cursor (dataset and schedule)", "restore dataset and schedule, or start a new run"),
    "version": ("policy version", "load the checkpoint of that version"),
    "seed": ("seed", "set seed to the checkpoint's"),
    "reference": (
        "reference",
        "restore the folder that policy.model names, policy.reference and trainer.reference_every, or start a new run",
    ),
    "kl_beta": ("KL coefficient", "set trainer.kl_beta to the checkpoint's"),
    "zero_stage": ("optimiser state (ZeRO stage)", "set trainer.zero_stage to the checkpoint's"),
    "precision": ("precision", "set trainer.precision to the checkpoint's"),
    "lora": ("adapters", "set [trainer.lora] to the checkpoint's"),
}
"""Fields of the state that must agree: the part they belong to, and how to mend it."""


def _difference(part: str, saved: object, present: object, remedy: str) -> str | None:
    then, now = _plain(saved), _plain(present)
    return None if then == now else f"{part}: the checkpoint has {then!r}, this run {now!r}; {remedy}"


def _plain(value: object) -> Any:
    """As JSON gives it back: a tuple is a list there."""
    return json.loads(json.dumps(value))


def _file_problem(file: Path, record: FileRecord) -> str | None:
    if not file.is_file():
        return f"{file} is missing"
    size = file.stat().st_size
    if size != record.bytes:
        return f"{file} has {size} bytes, {record.bytes} were written"
    return f"{file} was changed after it was written" if _digest(file) != record.digest else None


def _read_mark(folder: Path, step: int) -> _Mark:
    file = checkpoint_path(folder, step) / _COMPLETE
    try:
        return _MARK.validate_json(file.read_bytes())
    except FileNotFoundError:
        whole = ", ".join(map(str, complete_steps(folder))) or "none"
        raise CheckpointError(f"{folder} has no whole checkpoint of step {step}. Whole ones: {whole}.") from None
    except ValidationError as error:
        raise CheckpointError(
            f"{file} is damaged or was written by another version of Towline: {_first_complaint(error)}. "
            "Go on from an earlier checkpoint."
        ) from error


def _first_complaint(error: ValidationError) -> str:
    first: Mapping[str, Any] = error.errors()[0]
    place: Sequence[object] = first["loc"]
    return f"{'.'.join(map(str, place))} {first['msg']}".strip()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _steps(folder: Path) -> list[int]:
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for name in names if (match := _NAME.fullmatch(name)))


def _is_complete(folder: Path, step: int) -> bool:
    return (checkpoint_path(folder, step) / _COMPLETE).is_file()
