"""Files that appear whole or not at all."""

import contextlib
import errno
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
        fsync(temporary)
        _link(temporary, final)
        fsync(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replace_whole(final: Path) -> Generator[Path]:
    """Yield a temporary path beside `final`; on success it takes the place of `final` in one step."""
    temporary = _temporary(final)
    try:
        yield temporary
        fsync(temporary)
        os.replace(temporary, final)
        fsync(final.parent)
    finally:
        temporary.unlink(missing_ok=True)


def move_first(source: Path, final: Path) -> None:
    """Give `source`, a file or a folder, the name `final` on the same file system, replacing nothing.

    A file may be seen under both names for a moment, never under none; whoever is killed in between is finished by
    the next one who makes the same move.

    Raises:
        FileExistsError: `final` is something else; `source` stays.
        FileNotFoundError: `source` is gone: another process has moved it.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        # A folder has no second name; the kernel refuses to put it in the place of a file or of a full folder.
        _rename_folder(source, final)
    else:
        _link(source, final)
        fsync(final.parent)
        source.unlink()
    fsync(source.parent)


def leftovers(folder: Path) -> list[Path]:
    """What writers, killed ones or those at work, have under `folder`."""
    return sorted(path for path in folder.rglob(".*.tmp") if _TEMPORARY.fullmatch(path.name))


def remove_leftovers(folder: Path) -> int:
    """Remove what killed writers left under `folder`; return how many files. Only for whoever knows that no writer is
    alive in it."""
    found = leftovers(folder)
    for path in found:
        path.unlink(missing_ok=True)
    return len(found)


def _link(temporary: Path, final: Path) -> None:
    try:
        os.link(temporary, final)
    except FileExistsError:
        # A network file system that repeats a request may refuse the link that it has just made.
        if not os.path.samefile(temporary, final):
            raise


def _rename_folder(source: Path, final: Path) -> None:
    try:
        os.rename(source, final)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ENOTEMPTY):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final)) from error
        raise


def _temporary(final: Path) -> Path:
    final.parent.mkdir(parents=True, exist_ok=True)
    return final.with_name(f".{final.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


def fsync(path: Path) -> None:
    """Bring a file or the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
