"""A receiver of weights that sends itself a signal after some transfers: killed it is gone, stopped it is silent.

python weight_receiver_worker.py HOST:PORT PREFIX SIGNAL TRANSFERS
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from towline.rollout.receive_stream import receive_stream
from towline.rollout.transfer_group import Membership, TransferGroup


class FailingGroup(TransferGroup):
    def __init__(self, membership: Membership, number: signal.Signals, transfers: int) -> None:
        super().__init__(membership)
        self._number, self._left = number, transfers
        self._fail_if_due()

    def finish(self, work: Any, deadline: float, on_wait: Callable[[], None]) -> None:
        super().finish(work, deadline, on_wait)
        self._left -= 1
        self._fail_if_due()

    def _fail_if_due(self) -> None:
        if self._left == 0:
            os.kill(os.getpid(), self._number)


def main() -> None:
    address, prefix, name, transfers = sys.argv[1:]
    membership = Membership(store=address, prefix=prefix, rank=1, size=2, backend="gloo")
    receive_stream(FailingGroup(membership, signal.Signals[name], int(transfers)), timeout_s=120)


if __name__ == "__main__":
    main()
