"""What waits for a worker, and how much of it is handed out at once: small items several at a time, up to a time."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

BATCH_S = 0.01
"""A batch should take about as long as this: a round trip costs 0.2 ms and more."""
MAX_BATCH = 64
MAX_BATCH_CHARS = 2**18
MAX_QUEUED_CHARS = 2**22

Item = tuple[str, str]
"""Completion, gold answer."""


@dataclass(slots=True, kw_only=True)
class Task:
    ticket: int
    item: Item
    key: bytes
    """Of the cache."""
    num_deaths: int = 0
    """Workers that ended while they graded it."""

    @property
    def num_chars(self) -> int:
        return len(self.item[0]) + len(self.item[1])


class Pace:
    """A running mean of what one completion takes; one that took very long moves it little."""

    def __init__(self, span_s: float) -> None:
        """
        Args:
            span_s: of interest is how many fit into it.
        """
        self._span_s = self._usual_s = span_s

    def note(self, seconds: float) -> None:
        self._usual_s += 0.05 * (min(max(seconds, 1e-6), 2 * self._span_s) - self._usual_s)

    @property
    def num_within(self) -> int:
        """1 or more."""
        return max(1, int(self._span_s / self._usual_s))


class TaskQueue:
    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._tasks: deque[Task] = deque()
        self._num_chars = 0
        self.pace = Pace(BATCH_S)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def has_room(self) -> bool:
        return len(self) < MAX_BATCH * self._num_workers and self._num_chars < MAX_QUEUED_CHARS

    def append(self, task: Task) -> None:
        self._tasks.append(task)
        self._num_chars += task.num_chars

    def put_back(self, tasks: Iterable[Task]) -> None:
        """To the front, in their order."""
        for task in reversed(list(tasks)):
            self._tasks.appendleft(task)
            self._num_chars += task.num_chars

    def next_batch(self) -> list[Task]:
        """No more than a worker's share of what waits, so that none is idle while another has a full batch."""
        share = -(-len(self) // self._num_workers)
        num_tasks = min(share, MAX_BATCH, self.pace.num_within)
        batch: list[Task] = []
        room = MAX_BATCH_CHARS
        while self._tasks and len(batch) < num_tasks and (not batch or self._tasks[0].num_chars <= room):
            task = self._tasks.popleft()
            self._num_chars -= task.num_chars
            room -= task.num_chars
            batch.append(task)
        return batch

    def clear(self) -> None:
        self._tasks.clear()
        self._num_chars = 0
