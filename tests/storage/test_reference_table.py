"""A table of a reference's log-probs: read as it was written, and by nobody whom it is not for."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest

from towline.storage.errors import LedgerError
from towline.storage.reference_table import (
    ReferenceIdentity,
    read_reference_table,
    table_path,
    write_reference_table,
)

IDENTITY = ReferenceIdentity(model="a1", data="b2" * 16, precision="bfloat16")
LOGPROBS_P2 = np.array([[-1.5, -2.25], [-1e-9, -3e5], [-0.1, -0.2]])
REMEDY = "remove the file: it is computed again"


def written(folder: Path) -> Path:
    path = table_path(folder / "tables", IDENTITY)
    write_reference_table(path, IDENTITY, LOGPROBS_P2)
    return path


def test_a_table_comes_back_to_the_bit(tmp_path: Path) -> None:
    found = read_reference_table(written(tmp_path), IDENTITY)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, LOGPROBS_P2)


def test_other_pairs_have_another_file(tmp_path: Path) -> None:
    other = dataclasses.replace(IDENTITY, data="c3" * 16)
    assert table_path(tmp_path, other) != table_path(tmp_path, IDENTITY)


@pytest.mark.parametrize("name", ["model", "data", "precision"])
def test_a_table_of_another_model_other_pairs_or_another_precision_is_refused(name: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    wanted = dataclasses.replace(IDENTITY, **{name: "other"})
    found = getattr(IDENTITY, name)
    said = f"{path}: a reference table for {name} {found}, this run has other"
    with pytest.raises(LedgerError, match=f"^{re.escape(said)}.*{REMEDY}"):
        read_reference_table(path, wanted)


@pytest.mark.parametrize("damage", ["torn", "changed", "empty", "missing"])
def test_a_damaged_table_is_refused_with_the_remedy(damage: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    image = path.read_bytes()
    match damage:
        case "torn":
            path.write_bytes(image[: len(image) // 2])
        case "changed":
            assert b"bfloat16" in image
            path.write_bytes(image.replace(b"bfloat16", b"bfloat17"))
        case "empty":
            path.write_bytes(b"")
        case _:
            path.unlink()
    with pytest.raises(LedgerError, match=f"^{re.escape(str(path))}.*{REMEDY}"):
        read_reference_table(path, IDENTITY)


def test_a_writer_that_fails_leaves_the_table_that_was_there(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(IndexError):
        write_reference_table(path, IDENTITY, LOGPROBS_P2[:, :1])
    np.testing.assert_array_equal(read_reference_table(path, IDENTITY), LOGPROBS_P2)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
