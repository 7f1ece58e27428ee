"""Write and read the columns of one HDF5 file of the ledger, with one digest over all of them.

Integrity is checked on the decoded values, so it holds whatever the compression: HDF5's own per-chunk checksum
(fletcher32) says that the disk was true, the digest says that the file is the one that was sealed.
"""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import h5py as _h5py  # pyright: ignore[reportMissingTypeStubs]
import hdf5plugin
import numpy as np
from numpy.typing import NDArray

from towline.storage.errors import LedgerError
from towline.storage.ledger_schema import CHUNK_ELEMENTS, VERSIONS, Column

Columns = dict[str, NDArray[Any]]

h5py: Any = _h5py  # it has no types of its own

# Since this format HDF5 checks its own metadata (sizes, offsets, attributes) by checksums too.
_FORMAT = ("v110", "v110")


def write_columns(
    path: Path, kind: str, schema: tuple[Column, ...], columns: Columns, attributes: dict[str, Any]
) -> str:
    """Write the file and return its digest (hexadecimal blake2b). The caller publishes it.

    Raises:
        LedgerError: a value does not fit its column; nothing was written.
        OSError: the disk is full, or the like.
    """
    typed = {column.name: _typed(path, column, columns[column.name]) for column in schema}
    header = json.dumps(attributes, sort_keys=True)
    digest = _digest(typed, header)
    # HDF5 itself swallows the error of a full disk, or crashes: it builds the file in memory, Python writes it.
    with h5py.File(path, "w", driver="core", backing_store=False, libver=_FORMAT) as file:
        file.attrs["schema_version"] = VERSIONS[kind]
        # Text of fixed length lies under HDF5's checksums; of variable length it would not.
        for name, text in {"kind": kind, "header": header, "digest": digest}.items():
            file.attrs[name] = np.bytes_(text.encode())
        for name, values in typed.items():
            # Filters need chunks, and chunks need at least one element.
            packed = {} if values.size == 0 else _filters(values.size)
            file.create_dataset(name, data=values, **packed)
        file.flush()
        image: bytes = file.id.get_file_image()
    path.write_bytes(image)
    return digest


def read_columns(path: Path, kind: str, schema: tuple[Column, ...]) -> tuple[Columns, dict[str, Any], str]:
    """Return columns, attributes and digest; of an older version, without the columns that came since.

    Raises:
        LedgerError: the file is of another kind or a later version, does not open, or its content is not what was
            sealed.
    """
    try:
        image = path.read_bytes()
    except FileNotFoundError:
        raise LedgerError(f"{path} is missing.") from None
    except OSError as error:
        raise LedgerError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        # HDF5 sees bytes, not a file: no lock of its own, no handle that goes stale or cannot be pickled.
        with h5py.File(h5py.h5f.open_file_image(image)) as file:
            found = (_text(file, "kind"), int(file.attrs["schema_version"]))
            if found[0] != kind or not 1 <= found[1] <= VERSIONS[kind]:
                raise LedgerError(f"{path}: found kind and version {found}, expected {(kind, VERSIONS[kind])}.")
            schema = tuple(column for column in schema if column.since <= found[1])
            header, sealed = _text(file, "header"), _text(file, "digest")
            columns: Columns = {column.name: np.asarray(file[column.name]) for column in schema}
    except (OSError, KeyError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise LedgerError(f"{path} is torn or damaged: {error}. It was not read.") from error
    for column in schema:
        if columns[column.name].dtype != column.dtype:
            raise LedgerError(f"{path}: {column.name} is {columns[column.name].dtype}, expected {column.dtype}.")
    if _digest(columns, header) != sealed:
        raise LedgerError(f"{path}: its content is not what was sealed (digest {sealed[:12]}…). It was not read.")
    return columns, json.loads(header), sealed


def pack_texts(texts: list[str]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Texts → UTF-8 bytes and offsets. Lone surrogates, which a decoder may produce, survive the round trip."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    return np.frombuffer(b"".join(encoded), dtype=np.uint8), offsets([len(piece) for piece in encoded])


def unpack_texts(packed: NDArray[np.uint8], bounds: NDArray[np.int64]) -> list[str]:
    raw = packed.tobytes()
    return [raw[start:stop].decode("utf-8", "surrogatepass") for start, stop in itertools.pairwise(bounds)]


def offsets(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)


def _typed(path: Path, column: Column, values: NDArray[Any]) -> NDArray[Any]:
    typed = np.ascontiguousarray(values, dtype=column.dtype)
    if typed.dtype.kind in "iu" and not np.array_equal(typed, values):
        raise LedgerError(f"{path}: {column.name} has values that are no {column.dtype}. Nothing was written.")
    return typed


def _text(file: Any, name: str) -> str:
    return file.attrs[name].decode()


def _filters(size: int) -> dict[str, Any]:
    return {
        "chunks": (min(size, CHUNK_ELEMENTS),),
        "shuffle": True,
        "fletcher32": True,
        **hdf5plugin.Zstd(clevel=3),
    }


def _digest(columns: Columns, header: str) -> str:
    state = hashlib.blake2b(header.encode(), digest_size=32)
    for name in sorted(columns):
        state.update(f"{name}:{columns[name].dtype}:{columns[name].size};".encode())
        state.update(np.ascontiguousarray(columns[name]).data)
    return state.hexdigest()
