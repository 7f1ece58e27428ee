"""One HDF5 file: what goes in comes out, and whatever happened to its bytes since is noticed."""

import random
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from towline.storage.columns import offsets, pack_texts, read_columns, unpack_texts, write_columns
from towline.storage.errors import LedgerError
from towline.storage.ledger_schema import SCORES, SHARD, Column


def column(name: str, dtype: str) -> Column:
    return Column(name=name, dtype=dtype, length="N", meaning="")


SCHEMA = (column("ids", "int32"), column("inner/logprobs", "float32"), column("text", "uint8"), column("none", "int64"))


def small(path: Path) -> bytes:
    """A file of every kind of column; its bytes."""
    columns = {
        "ids": np.arange(40),
        "inner/logprobs": -np.arange(40) / 7,
        "text": np.frombuffer(b"how it reads " * 9, dtype=np.uint8),
        "none": np.zeros(0),
    }
    write_columns(path, "rollouts", SCHEMA, columns, {"engine": 3})
    return path.read_bytes()


def one(path: Path, values: NDArray, dtype: str) -> NDArray:
    """Write one column and read it back."""
    schema = (column("values", dtype),)
    write_columns(path, "rollouts", schema, {"values": values}, {})
    return read_columns(path, "rollouts", schema)[0]["values"]


def refusal(path: Path, kind: str = "rollouts", schema: tuple[Column, ...] = SCHEMA) -> str:
    """The error of reading a file, which names it."""
    with pytest.raises(LedgerError, match=re.escape(str(path))) as refused:
        read_columns(path, kind, schema)
    return str(refused.value)


def test_columns_attributes_and_digest_come_back(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    columns = {"ids": np.array([1, 2]), "inner/logprobs": np.array([-0.5]), "text": np.zeros(0), "none": np.zeros(0)}
    digest = write_columns(path, "rollouts", SCHEMA, columns, {"b": [1, None], "a": "é\ud800"})
    found, attributes, sealed = read_columns(path, "rollouts", SCHEMA)
    assert found["ids"].tolist() == [1, 2]
    assert found["inner/logprobs"].tolist() == [-0.5]
    assert [found[name].size for name in ("text", "none")] == [0, 0]
    assert [found[column.name].dtype for column in SCHEMA] == ["int32", "float32", "uint8", "int64"]
    assert attributes == {"a": "é\ud800", "b": [1, None]}
    assert sealed == digest
    assert len(bytes.fromhex(digest)) == 32


def test_the_digest_depends_on_values_names_types_and_attributes_only(tmp_path: Path) -> None:
    def digest(values: list[int], name: str = "a", dtype: str = "int32", **attributes: int) -> str:
        schema = (column(name, dtype), column("z", "int32"))
        columns = {name: np.array(values), "z": np.array([5])}
        return write_columns(tmp_path / "x.h5", "rollouts", schema, columns, attributes)

    assert digest([1, 2]) == digest([1, 2])
    others = [digest([2, 1]), digest([1, 2], "b"), digest([1, 2], dtype="int64"), digest([1, 2], seed=1), digest([1])]
    assert len({digest([1, 2]), *others}) == 6


def test_token_ids_beyond_16_bits_survive(tmp_path: Path) -> None:
    # case G5-17
    ids = [0, 65535, 65536, 151643, 2**31 - 1]
    assert one(tmp_path / "a.h5", np.array(ids), "int32").tolist() == ids


def test_logprobs_and_rewards_keep_single_precision(tmp_path: Path) -> None:
    # case G5-16: 70000 would be infinite and 1e-9 zero in 16 bits
    values = np.array([70000.0, 1e-9, -0.0003, -23.718])
    np.testing.assert_allclose(one(tmp_path / "a.h5", values, "float32"), values, rtol=1e-6)
    types = {column.name: column.dtype for column in (*SHARD, *SCORES)}
    assert (types["completion/logprobs"], types["parts"], types["total"]) == ("float32", "float64", "float64")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(2**31, "int32"), (-1, "uint32"), (2**32, "uint32"), (np.uint64(2**63), "int64"), (256, "uint8"), (0.5, "int32")],
)
def test_a_value_that_does_not_fit_its_column_is_refused_and_never_wrapped(
    tmp_path: Path, value: float, dtype: str
) -> None:
    path = tmp_path / "a.h5"
    with pytest.raises(LedgerError, match=f"a.h5: values has values that are no {dtype}"):
        one(path, np.array([value]), dtype)
    assert not path.exists()


def test_chunks_are_neither_rows_nor_the_whole_file(tmp_path: Path) -> None:
    # case G5-12: 20,000 token ids; one id a chunk made 833,864 bytes of them
    path = tmp_path / "a.h5"
    one(path, np.random.default_rng(0).integers(0, 2**31, 20_000), "int32")
    assert path.stat().st_size < 400_000
    with h5py.File(path) as file:
        assert 16_384 <= file["values"].chunks[0] * 4 <= 4_194_304


def test_no_text_is_of_variable_length(tmp_path: Path) -> None:
    # case G5-09; and HDF5 keeps no checksum of such text
    small(tmp_path / "a.h5")
    with h5py.File(tmp_path / "a.h5") as file:
        kinds = [file.attrs.get_id(name).dtype.kind for name in ("kind", "header", "digest")]
        assert kinds == ["S", "S", "S"]
        assert not [column.name for column in SCHEMA if file[column.name].dtype.kind not in "iuf"]


def test_attributes_may_be_long(tmp_path: Path) -> None:
    # HDF5 has a limit of 64 KiB for what lies in an object's head
    hashes = {str(version): f"{version:064x}" for version in range(3000)}
    write_columns(tmp_path / "a.h5", "rollouts", (), {}, {"weight_hashes": hashes})
    assert read_columns(tmp_path / "a.h5", "rollouts", ())[1] == {"weight_hashes": hashes}


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    assert refusal(tmp_path / "a.h5").endswith("a.h5 is missing.")


def test_what_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    assert refusal(tmp_path).endswith("cannot be read: Is a directory.")


@pytest.mark.parametrize("content", [b"", b"\0" * 96, b"not HDF5 at all", b"\x89HDF\r\n\x1a\n"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.h5"
    path.write_bytes(content)
    assert "torn or damaged" in refusal(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    whole = small(path)
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert "torn or damaged" in refusal(path)


def test_a_flipped_byte_is_refused_or_was_not_in_use(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    whole = small(path)
    columns, attributes, digest = read_columns(path, "rollouts", SCHEMA)
    generator = random.Random(7)
    num_refused = num_unused = 0
    for place in generator.sample(range(len(whole)), 250):
        damaged = bytearray(whole)
        damaged[place] ^= generator.randrange(1, 256)
        path.write_bytes(damaged)
        try:
            found = read_columns(path, "rollouts", SCHEMA)
        except LedgerError as error:
            num_refused += str(path) in str(error)
        else:
            num_unused += 1
            assert all(np.array_equal(found[0][name], columns[name]) for name in columns), place
            assert found[1:] == (attributes, digest), place
    assert num_refused > 100
    assert num_refused + num_unused == 250


@pytest.mark.parametrize("name", ["ids", "inner/logprobs", "text"])
def test_a_flipped_byte_in_the_stored_values_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.h5"
    whole = bytearray(small(path))
    with h5py.File(path) as file:
        chunk = file[name].id.get_chunk_info(0)
    whole[chunk.byte_offset + chunk.size // 2] ^= 1
    path.write_bytes(whole)
    assert "torn or damaged" in refusal(path)


@pytest.mark.parametrize("name", ["ids", "inner/logprobs", "text"])
def test_a_value_changed_by_means_of_hdf5_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.h5"
    small(path)
    with h5py.File(path, "r+") as file:
        file[name][5] = 1
    assert "is not what was sealed" in refusal(path)


@pytest.mark.parametrize("name", ["header", "digest"])
def test_a_changed_attribute_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.h5"
    small(path)
    with h5py.File(path, "r+") as file:
        text = file.attrs[name].decode()
        file.attrs[name] = np.bytes_(text.translate(str.maketrans("0123456789", "1234567890")).encode())
    assert "is not what was sealed" in refusal(path)


@pytest.mark.parametrize("name", ["kind", "schema_version", "header", "digest"])
def test_an_attribute_that_is_gone_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "a.h5"
    small(path)
    with h5py.File(path, "r+") as file:
        del file.attrs[name]
    assert "torn or damaged" in refusal(path)


def test_another_kind_or_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    small(path)
    assert "found kind and version ('rollouts', 1), expected ('scores', 3)" in refusal(path, "scores")
    with h5py.File(path, "r+") as file:
        file.attrs["schema_version"] = 2
    assert "found kind and version ('rollouts', 2), expected ('rollouts', 1)" in refusal(path)


def test_an_older_file_is_read_without_the_columns_that_came_since(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    schema = (column("old", "int64"), Column(name="new", dtype="int64", length="N", meaning="", since=2))
    write_columns(path, "scores", schema[:1], {"old": np.array([1])}, {})
    assert "torn or damaged" in refusal(path, "scores", schema)
    with h5py.File(path, "r+") as file:
        file.attrs["schema_version"] = 1
    assert list(read_columns(path, "scores", schema)[0]) == ["old"]
    with h5py.File(path, "r+") as file:
        file.attrs["schema_version"] = 0
    assert "found kind and version ('scores', 0), expected ('scores', 3)" in refusal(path, "scores", schema)


def test_a_column_of_another_type_or_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    small(path)
    assert "ids is int32, expected int64" in refusal(path, schema=(column("ids", "int64"),))
    assert "torn or damaged" in refusal(path, schema=(column("absent", "int64"),))
    assert "inner is " in refusal(path, schema=(column("inner", "int64"),))


def test_a_column_that_was_added_to_the_digest_s_columns_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    small(path)
    assert "is not what was sealed" in refusal(path, schema=SCHEMA[:-1])


def test_reading_takes_no_lock_and_keeps_no_handle(tmp_path: Path) -> None:
    # cases G5-03, -14
    path = tmp_path / "a.h5"
    small(path)
    for locking in (True, False):
        with h5py.File(path, "r", locking=locking):
            columns, _, _ = read_columns(path, "rollouts", SCHEMA)
    assert path not in [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    path.unlink()
    assert columns["ids"].tolist() == list(range(40))


def test_texts_come_back_whatever_they_hold() -> None:
    texts = ["", "plain", "π ≈ 3.14 数学 🙂", "lone \ud800 and \udfff", "\x00\x85\u2028", ""]
    packed, bounds = pack_texts(texts)
    assert packed.dtype == np.uint8
    assert bounds.tolist() == [0, 0, 5, 5 + 23, 28 + 16, 44 + 6, 50]
    assert unpack_texts(packed, bounds) == texts
    assert unpack_texts(*pack_texts([])) == []


def test_offsets_are_running_sums_from_zero() -> None:
    assert offsets([]).tolist() == [0]
    assert offsets([2, 0, 3]).tolist() == [0, 2, 2, 5]
    assert offsets([2**31, 2**31]).tolist() == [0, 2**31, 2**32]
    assert offsets([]).dtype == offsets([1]).dtype == np.int64
