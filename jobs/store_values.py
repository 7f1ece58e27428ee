"""Values of the control store: JSON, authenticated with the run's key. Never pickles, paths to execute, or code."""

import hashlib
import hmac
import json
from typing import Any

from towline.storage.errors import StoreError

_TAG = 32


def seal(key: bytes, name: str, value: Any) -> bytes:
    """The same value under the same name gives the same bytes, so that compare-and-set works on sealed values."""
    payload = json.dumps(value, sort_keys=True).encode()
    return _tag(key, name, payload) + payload


def unseal(key: bytes, name: str, data: bytes) -> Any:
    """Raises StoreError when the value was not written with this run's key under this name."""
    tag, payload = data[:_TAG], data[_TAG:]
    if not hmac.compare_digest(tag, _tag(key, name, payload)):
        raise StoreError(f"control store: the value of {name} was not written by this run. Is another run using it?")
    return json.loads(payload)


def _tag(key: bytes, name: str, payload: bytes) -> bytes:
    message = name.encode() + b"\0" + payload
    return hashlib.blake2b(message, key=key[:64], digest_size=_TAG // 2).hexdigest().encode()
