"""A folder that appears whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def published_folder(destination: Path) -> Iterator[Path]:
    """Give a temporary folder beside `destination` and rename it there at the end; on an error nothing stays."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        yield folder
        _open_to_readers(folder)
        os.rename(folder, destination)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _open_to_readers(folder: Path) -> None:
    """Undo the private modes of temporary files, so that others on a shared file system can use the folder."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
