"""Which files make up a dataset, in which order. Refuses a folder whose meaning would have to be guessed."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

from towline.storage.errors import DataError

SUFFIXES = (".jsonl", ".parquet")
_SPLIT = re.compile(r"(?:^|[^a-z])(train|test|valid|val|dev|eval)(?:ing|ation|uation)?(?![a-z])")


def data_files(source: Path) -> list[Path]:
    """List the files whose rows, one file after the other, are the dataset `source`.

    A folder that `save_to_disk` wrote lists its own files (`.arrow`); any other folder is read in order of file name.
    """
    try:
        if source.is_dir():
            return _files_of_folder(source)
        if not source.exists():
            raise DataError(f"{source} does not exist.{_nearest(source)}")
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error.strerror}") from error
    if source.suffix not in SUFFIXES:
        raise DataError(f"{source} is not a dataset; expected a .jsonl or .parquet file, or a folder of them")
    return [source]


def shown(path: Path) -> str:
    """Write a path as short as it stays clickable: relative to the working folder if it lies in it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _nearest(missing: Path) -> str:
    siblings = [path.name for path in missing.parent.iterdir()] if missing.parent.is_dir() else []
    near = difflib.get_close_matches(missing.name, siblings, n=1)
    return (
        f" Did you mean {near[0]}?" if near else " Expected a file or folder on disk: nothing is fetched from the Hub."
    )


def _files_of_folder(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").exists():
        return _only_split(folder)
    if (folder / "state.json").exists():
        return [folder / file["filename"] for file in _json(folder / "state.json")["_data_files"]]
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and not path.name.startswith("."))
    if not files:
        inside = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
        raise DataError(f"{folder} holds no .jsonl or .parquet file; found {inside}")
    _refuse_mixture(folder, files)
    return files


def _only_split(folder: Path) -> list[Path]:
    splits: list[str] = _json(folder / "dataset_dict.json")["splits"]
    if len(splits) != 1:
        raise DataError(f"{folder} holds the splits {', '.join(splits)}; name one of them, as {folder / splits[0]}")
    return _files_of_folder(folder / splits[0])


def _refuse_mixture(folder: Path, files: list[Path]) -> None:
    """A folder as the Hub has it often holds the test set, or the same rows in two formats, beside the training set."""
    if len({path.suffix for path in files}) > 1:
        raise DataError(f"{folder} holds .jsonl and .parquet files; name one file, or keep one kind in the folder")
    split_of = {path.name: _split_of(path) for path in files}
    if len(set(split_of.values())) > 1:
        found = ", ".join(list(split_of)[:8])
        raise DataError(f"{folder} mixes splits ({found}); name one file, or keep one split in the folder")


def _split_of(path: Path) -> str:
    match = _SPLIT.search(path.stem.lower())
    return match.group(1) if match else "train"


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); was the folder copied whole?") from error
