"""Values of the control store are believed only if this run wrote them under this very name."""

import random

import pytest

from towline.jobs.store_values import seal, unseal
from towline.storage.errors import StoreError

KEY = bytes(range(32))


def test_values_come_back() -> None:
    for value in (None, True, 0, -1.5, 2**63 - 1, "", "é\ud800\0", [1, [2, {}]], {"engine": 1, "nonce": "ab"}):
        assert unseal(KEY, "name", seal(KEY, "name", value)) == value


def test_the_same_value_has_the_same_bytes() -> None:
    assert seal(KEY, "lease", {"a": 1, "b": [2, 3]}) == seal(KEY, "lease", {"b": [2, 3], "a": 1})


def test_different_values_names_or_keys_have_different_bytes() -> None:
    sealed = [
        seal(KEY, "lease", 1),
        seal(KEY, "lease", 2),
        seal(KEY, "lease", "1"),
        seal(KEY, "leases", 1),
        seal(KEY[::-1], "lease", 1),
    ]
    assert len({data[:32] for data in sealed}) == len(sealed)


def test_a_value_is_sealed_into_these_bytes() -> None:
    assert seal(KEY, "stop", {"b": 1, "a": None}) == b"3e080cf6e368fc0c2611de402b60b001" + b'{"a": null, "b": 1}'


def test_a_value_with_any_bit_changed_is_refused() -> None:
    sealed = seal(KEY, "commit", {"version": 12})
    for place in range(len(sealed)):
        for bit in range(8):
            changed = bytearray(sealed)
            changed[place] ^= 1 << bit
            with pytest.raises(StoreError, match="the value of commit was not written by this run"):
                unseal(KEY, "commit", bytes(changed))


def test_a_value_cut_short_or_made_longer_is_refused() -> None:
    sealed = seal(KEY, "commit", 12)
    for data in [*(sealed[:length] for length in range(len(sealed))), sealed + b" ", b"12"]:
        with pytest.raises(StoreError):
            unseal(KEY, "commit", data)


def test_a_value_moved_to_another_name_is_refused() -> None:
    with pytest.raises(StoreError, match="publish/3"):
        unseal(KEY, "publish/3", seal(KEY, "publish/2", 1))


def test_a_value_of_another_run_is_refused() -> None:
    with pytest.raises(StoreError, match="Is another run using it"):
        unseal(bytes(32), "stop", seal(KEY, "stop", 1))


def test_random_bytes_are_refused() -> None:
    generator = random.Random(0)
    for _ in range(200):
        with pytest.raises(StoreError):
            unseal(KEY, "name", generator.randbytes(generator.randrange(0, 90)))


def test_only_data_is_sealed() -> None:
    for value in ({1, 2}, b"bytes", object(), len):
        with pytest.raises(TypeError):
            seal(KEY, "name", value)
