"""Which checkpoints are whole, which to keep. Writing their content is the trainer's."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from towline.storage.run_directory import write_json

_NAME = re.compile(r"step-(\d{6,})")
_COMPLETE = "complete.json"


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}"


def complete_steps(folder: Path) -> list[int]:
    """Steps with a whole checkpoint, ascending. One that was cut short has no completion mark and is not listed."""
    return [step for step in _steps(folder) if _is_complete(folder, step)]


def newest_step(folder: Path, *, at_most: int | None = None) -> int | None:
    steps = [step for step in complete_steps(folder) if at_most is None or step <= at_most]
    return steps[-1] if steps else None


def mark_complete(folder: Path, step: int, content: dict[str, object]) -> None:
    """Written last, after every rank has written its part."""
    write_json(checkpoint_path(folder, step) / _COMPLETE, content)


def remove_incomplete(folder: Path, step: int) -> None:
    """Clear what a dead writer left of this step, so that old and new files cannot mix."""
    path = checkpoint_path(folder, step)
    if path.is_dir() and not _is_complete(folder, step):
        shutil.rmtree(path)


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
        # The mark goes first: a removal that is cut short leaves nothing that looks whole.
        (checkpoint_path(folder, step) / _COMPLETE).unlink()
        shutil.rmtree(checkpoint_path(folder, step))
    return removed


def _steps(folder: Path) -> list[int]:
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(int(match.group(1)) for name in names if (match := _NAME.fullmatch(name)))


def _is_complete(folder: Path, step: int) -> bool:
    return (checkpoint_path(folder, step) / _COMPLETE).is_file()
