"""Files that appear whole or not at all."""

import contextlib
import os
import re
import secrets
from collections.abc import Generator
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.tmp")


@contextlib.contextmanager
def publish_first(final: Path) -> Generator[Path]:
    """Yield a temporary path beside `final`; on success make it appear as `final`, unless someone else was first.

    `os.link` refuses to replace, so what is published is never changed. Raises FileExistsError for the later writer,
    whose file is removed.
    """
    temporary = _temporary(final)
    try:
        yield temporary
        _fsync(temporary)
        _link(temporary, final)
        _fsync(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replace_whole(final: Path) -> Generator[Path]:
    """Yield a temporary path beside `final`; on success it takes the place of `final` in one step."""
    temporary = _temporary(final)
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, final)
        _fsync(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed writers left under `folder`. Only for whoever knows that no writer is alive in it."""
    for path in list(folder.rglob(".*.tmp")):
        if _TEMPORARY.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _link(temporary: Path, final: Path) -> None:
    try:
        os.link(temporary, final)
    except FileExistsError:
        # A network file system that repeats a request may refuse the link that it has just made.
        if not os.path.samefile(temporary, final):
            raise


def _temporary(final: Path) -> Path:
    final.parent.mkdir(parents=True, exist_ok=True)
    return final.with_name(f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
