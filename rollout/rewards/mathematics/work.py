"""One budget for everything that comparing two answers may cost, spent before the work is done.

The unit is about a microsecond on the machines of 2024. A budget makes the same answer too costly everywhere, which
no clock does; so the verdict depends neither on the machine nor on what else it is doing.
"""

MAX_WORK = 300_000


class TooCostly(Exception):
    """The value cannot be told within the bounds; the message says which bound."""


class Work:
    def __init__(self, limit: float = MAX_WORK) -> None:
        self._left = float(limit)

    def spend(self, cost: float) -> None:
        self._left -= cost
        if self._left < 0:
            raise TooCostly("comparing the answers takes too much work")
