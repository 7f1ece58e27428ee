"""The process group over which weights travel: member 0 sends, every engine worker receives.

It stands beside torch's default group and never touches it. A wait is polled, so that a signal handler runs within
20 ms and a deadline holds; the group's own time-out is long, because it also bounds the joining.
"""

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from towline.storage.errors import TransferError

GROUP_TIMEOUT_S = 300.0
JOIN_TIMEOUT_S = 60.0
"""Members join right after they have said that they are there."""

_ABANDONED: list[Any] = []
"""Groups given up with a broadcast under way, and that broadcast. Freeing one would wait for it, all of GROUP_TIMEOUT_S
long if the peer is silent; so they are kept until the process ends, at most one for each try."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Everything a member needs to join; plain data, so that it can cross to a worker process."""

    store: str
    """host:port of the control store."""
    prefix: str
    """Fresh for each formation of the group."""
    rank: int
    size: int
    backend: str
    """ "gloo" for tensors in host memory, "nccl" for tensors on a GPU."""


class TransferGroup:
    def __init__(
        self,
        membership: Membership,
        timeout_s: float = JOIN_TIMEOUT_S,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Return once every member is there.

        Args:
            on_wait: called while waiting; may raise to give up.

        Raises:
            TransferError: a member did not come within `timeout_s`.
        """
        self.membership = membership
        is_nccl = membership.backend == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
        self._group = self._join(time.monotonic() + timeout_s, on_wait)

    def _join(self, deadline: float, on_wait: Callable[[], None]) -> Any:
        """Joining blocks where no signal handler runs, and as long as the group's own time-out: so in a thread."""
        formed: queue.Queue[Any] = queue.Queue()
        # A daemon: one that waits for a member that never comes must not keep the process.
        threading.Thread(target=lambda: formed.put(_form(self.membership, self.device)), daemon=True).start()
        while time.monotonic() < deadline:
            on_wait()
            try:
                group = formed.get(timeout=0.02)
            except queue.Empty:
                continue
            if isinstance(group, RuntimeError):
                raise TransferError(f"{self._named()} could not join: {group}") from group
            return group
        raise TransferError(f"{self._named()} could not join: another member did not come.")

    def _named(self) -> str:
        member = self.membership
        return f"weight transfer {member.prefix}: member {member.rank} of {member.size}"

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start to broadcast from member 0; `tensor` is uint8 or int64, flat, on `self.device`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        try:
            return self._group.broadcast([tensor], options)
        except RuntimeError as error:
            raise TransferError(f"weight transfer {self.membership.prefix} broke off: {error}") from error

    def finish(self, work: Any, deadline: float, on_wait: Callable[[], None]) -> None:
        """Poll `work` until it is done.

        Args:
            deadline: on `time.monotonic`'s clock, s.
            on_wait: called while waiting; may raise to give up.

        Raises:
            TransferError: the peer is gone or silent.
        """
        pause = 0.0005
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._abandon(work)
                raise TransferError(
                    f"weight transfer {self.membership.prefix}: a member is silent past the deadline. "
                    "Raise run.sync_timeout_s if the network is slow; otherwise see the logs of the engines."
                )
            try:
                on_wait()
            except TransferError:
                self._abandon(work)
                raise
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        try:
            work.wait()
        except RuntimeError as error:
            raise TransferError(f"weight transfer {self.membership.prefix} broke off: {error}") from error

    def _abandon(self, work: Any) -> None:
        if self.membership.backend == "nccl":
            # Ends the kernel that waits on the GPU, and which everything enqueued later would wait for.
            self._group.abort()
        _ABANDONED.append((self._group, work))


def _form(membership: Membership, device: torch.device) -> Any:
    """The group, once every member is there, or the error."""
    host, port = membership.store.rsplit(":", 1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    try:
        client = TCPStore(host, int(port), None, False, timeout, wait_for_workers=False)
        store = PrefixStore(membership.prefix, client)
        if membership.backend == "nccl":
            torch.cuda.set_device(device)  # a thread's own
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return dist.ProcessGroupNCCL(store, membership.rank, membership.size, options)
        return dist.ProcessGroupGloo(store, membership.rank, membership.size, timeout)
    except RuntimeError as error:
        return error
