"""A client of the run's control store, for the processes that have torch.

One client belongs to one thread: a wait holds it. Waits are cut into slices of at most a second, since Python's
signal handlers do not run inside one. What matters is read back: `set` to a dead store is lost without a word.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from towline.jobs.store_values import seal, unseal
from towline.storage.errors import StoreError

_SLICE_S = 0.5


class ControlStore:
    """Args:
    address: host:port.
    key: the run's secret.
    attempt: names are private to it, so that nothing left over from an earlier start is believed.
    """

    def __init__(self, address: str, key: bytes, attempt: int, timeout_s: float = 60.0) -> None:
        self.address = address
        host, port = address.rsplit(":", 1)
        self._key = key
        self._prefix = f"attempt-{attempt}/"
        try:
            self._store = TCPStore(host, int(port), None, False, timedelta(seconds=timeout_s), wait_for_workers=False)
        except RuntimeError as error:
            raise StoreError(f"no control store at {address}: {error}") from error

    def set(self, name: str, value: Any) -> None:
        sealed = seal(self._key, name, value)
        self._ask(self._store.set, self._prefix + name, sealed)
        if self._ask(self._store.get, self._prefix + name) != sealed:
            raise StoreError(f"control store at {self.address}: {name} was changed while it was written.")

    def get(self, name: str) -> Any | None:
        """The value, or None when there is none yet. Does not wait."""
        if not self._ask(self._store.check, [self._prefix + name]):
            return None
        return unseal(self._key, name, self._ask(self._store.get, self._prefix + name))

    def wait(self, name: str, timeout_s: float, on_wait: Callable[[], None] = lambda: None) -> Any:
        """The value once it is there. `on_wait` runs at least once a second and may raise to give up."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            on_wait()
            try:
                # To torch 0 ms means for ever.
                self._store.wait([self._prefix + name], timedelta(seconds=min(_SLICE_S, max(left, 0.001))))
            except DistStoreError:
                continue
            except RuntimeError as error:
                raise StoreError(f"the control store at {self.address} is gone: {error}") from error
            return unseal(self._key, name, self._ask(self._store.get, self._prefix + name))
        raise StoreError(f"control store: nobody wrote {name} within {timeout_s:g} s.")

    def exchange(self, name: str, old: Any | None, new: Any) -> bool:
        """Write `new` if `old` (None: nothing) is what stands. True if `new` stands now: make it unique."""
        expected = b"" if old is None else seal(self._key, name, old)
        sealed = seal(self._key, name, new)
        # The answer for a missing key is the expected value itself: only our own value means that we won.
        return self._ask(self._store.compare_set, self._prefix + name, expected, sealed) == sealed

    def _ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            raise StoreError(f"the control store at {self.address} is gone: {error}") from error
