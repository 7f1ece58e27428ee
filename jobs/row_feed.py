"""New rows of a JSON-lines file, each told once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from towline.storage.run_directory import read_jsonl


class RowFeed:
    """What is there already when it is made is not told: an attempt tells what it does, not what earlier ones did."""

    def __init__(self, path: Path, tell: Callable[[dict[str, Any]], None]) -> None:
        self._path, self._tell = path, tell
        self._told = len(read_jsonl(path))
        self._size = -1

    def poll(self) -> None:
        size = self._path.stat().st_size if self._path.is_file() else 0
        if size == self._size:
            return
        self._size = size
        rows = read_jsonl(self._path)
        for row in rows[self._told :]:
            self._tell(row)
        self._told = len(rows)
