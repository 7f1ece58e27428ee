"""Rows as their source has them: JSONL, Parquet, Arrow (`save_to_disk`), a procedural task.

A row that cannot be read at all carries its problem instead of values; whether its values make a prompt is not judged
here. pyarrow and reasoning_gym are imported only when a source needs them: a login node may lack both.
"""

import dataclasses
import difflib
import importlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from towline.storage.data_config import SourceConfig
from towline.storage.dataset_files import data_files, shown
from towline.storage.errors import DataError

JSON_KINDS: dict[type, str] = {str: "a string", int: "a number", list: "a list", dict: "an object"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRow:
    where: str
    """File and line (from 1), or file and row (from 0), as a message shows it."""
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    problem: str | None = None
    """Why the row cannot be read; None if `values` hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of a table are read; the fields of a JSON object are read whole."""

    required: Sequence[str] = ()
    optional: Sequence[str] = ()
    """Read where the table has them."""
    naming: str = ""
    """How to say which columns are meant."""

    def present(self, path: Path, available: Sequence[str]) -> list[str]:
        """Those of a table, or DataError for one that is missing."""
        for column in self.required:
            if column not in available:
                raise DataError(f"{shown(path)}: {missing_field(column, available, self.naming)}")
        return [*self.required, *(column for column in self.optional if column in available)]


def source_rows(config: SourceConfig) -> Iterator[SourceRow]:
    """Read every row of the source in order."""
    if config.task is not None:
        yield from _task_rows(config.task, config)
        return
    columns = Columns(required=config.columns, optional=config.optional_columns, naming=config.naming)
    for path in data_files(Path(config.train)):
        yield from READERS[path.suffix](path, columns)


def missing_field(name: str, available: Iterable[str], mend: str) -> str:
    """Say that a column is missing, which there are, and which was probably meant; else how to name it."""
    names = list(available)
    near = difflib.get_close_matches(name, names, n=1)
    mend = f"Did you mean {near[0]}?" if near else mend
    return f'field "{name}" is missing; the row has: {", ".join(names[:12]) or "nothing"}. {mend}'


def _jsonl_rows(path: Path, columns: Columns) -> Iterator[SourceRow]:
    try:
        with path.open("rb") as file:
            yield from json_rows(shown(path), file)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error


def json_rows(name: str, file: BinaryIO) -> Iterator[SourceRow]:
    """
    Args:
        name: of the file, for messages.
    """
    blank: list[str] = []
    for where, line in _lines(name, file):
        if not line.strip():
            blank.append(where)
            continue
        # Blank lines are a fault only once something follows them.
        yield from (SourceRow(where=gap, problem="blank line; expected a JSON object") for gap in blank)
        blank.clear()
        yield _json_row(where, line)


def _lines(name: str, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Split at line feeds only: other separators (U+2028, form feed) are legal inside a JSON string."""
    for number, line in enumerate(file, start=1):
        yield f"{name}:{number}", line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line


def _json_row(where: str, line: bytes) -> SourceRow:
    try:
        values: object = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return SourceRow(where=where, problem=f"byte 0x{line[error.start]:02x} at {error.start + 1} is not UTF-8")
    except json.JSONDecodeError as error:
        return SourceRow(where=where, problem=f"not JSON at column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested without end
        return SourceRow(where=where, problem=f"not usable as JSON: {error}")
    if not isinstance(values, dict):
        return SourceRow(where=where, problem=f"found {json_kind(values)}; expected a JSON object")
    return SourceRow(where=where, values=cast(dict[str, Any], values))


def json_kind(value: object) -> str:
    """Name a value as JSON does."""
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    return JSON_KINDS.get(type(value), type(value).__name__)


def _parquet_rows(path: Path, columns: Columns) -> Iterator[SourceRow]:
    parquet = _import("pyarrow.parquet", path)

    def batches(stack: ExitStack) -> Iterator[Any]:
        file = stack.enter_context(parquet.ParquetFile(path))
        return file.iter_batches(columns=columns.present(path, file.schema_arrow.names))

    return _batch_rows(path, batches)


def _arrow_rows(path: Path, columns: Columns) -> Iterator[SourceRow]:
    pyarrow = _import("pyarrow", path)

    def batches(stack: ExitStack) -> Iterator[Any]:
        reader = stack.enter_context(pyarrow.ipc.open_stream(stack.enter_context(pyarrow.memory_map(str(path)))))
        present = columns.present(path, reader.schema.names)
        return (batch.select(present) for batch in reader)

    return _batch_rows(path, batches)


READERS: dict[str, Callable[[Path, Columns], Iterator[SourceRow]]] = {
    ".jsonl": _jsonl_rows,
    ".parquet": _parquet_rows,
    ".arrow": _arrow_rows,
}


def _batch_rows(path: Path, batches: Callable[[ExitStack], Iterator[Any]]) -> Iterator[SourceRow]:
    row = 0
    try:
        with ExitStack() as stack:
            for batch in batches(stack):
                for values in batch.to_pylist():
                    yield SourceRow(where=f"{shown(path)} row {row} (from 0)", values=values)
                    row += 1
    except (_import("pyarrow", path).ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read from row {row} (from 0) on: {error}") from error


def _task_rows(task: str, config: SourceConfig) -> Iterator[SourceRow]:
    for index, example in enumerate(_create_task(task, config)):
        values = {"prompt": example["question"], "answer": example["answer"]}
        yield SourceRow(where=f"{config.train}[{index}]", values=values)


def _create_task(task: str, config: SourceConfig) -> Iterable[dict[str, Any]]:
    factory = _import("reasoning_gym.factory", config.train)
    tasks: dict[str, Any] = factory.DATASETS
    if task not in tasks:
        near = difflib.get_close_matches(task, tasks, n=3, cutoff=0.5) or sorted(tasks)[:12]
        raise DataError(f"{config.train} is not a task. Nearest: {', '.join(near)} ({len(tasks)} tasks in all)")
    _, settings = tasks[task]
    known = {setting.name for setting in dataclasses.fields(settings)} - {"size", "seed"}
    if unknown := sorted(config.options.keys() - known):
        raise DataError(f"{config.train}: options.{unknown[0]} is not a setting; known: {', '.join(sorted(known))}")
    try:
        return factory.create_dataset(task, size=config.size, seed=config.seed, **config.options)
    except (AssertionError, ValueError, TypeError) as error:  # how tasks refuse the value of a setting
        raise DataError(f"{config.train} refuses its options: {error}") from error


def _import(module: str, needed_by: Path | str) -> Any:
    package = module.partition(".")[0]
    try:
        with warnings.catch_warnings():
            # cellpylib, which reasoning_gym imports, compares with a literal by identity; the user cannot mend it.
            warnings.simplefilter("ignore", SyntaxWarning)
            return importlib.import_module(module)
    except ImportError as error:
        raise DataError(f"{needed_by} needs {package}, which cannot be imported here: {error}") from error
