"""One call of `score_many`: items are taken one by one as there is room for them, scores come in any order, and are
given back in the order of the items. Of an item that is under way its first characters are kept, no more."""

import time
from collections.abc import Callable, Iterable, Sized

from towline.rollout.score_timings import SHOWN_CHARS, ScoreTimings
from towline.rollout.scoring_messages import Outcome
from towline.rollout.scoring_queue import Item
from towline.storage.records import Score

PROGRESS_S = 0.25
OnProgress = Callable[[int, int], None]
"""Called with (number done, number of items) at least once a second, and at the end. Where the items do not tell their
number it is that of the items taken so far."""


class ScoreCall:
    def __init__(
        self, items: Iterable[Item], timings: ScoreTimings, on_progress: OnProgress | None, where: Callable[[int], str]
    ) -> None:
        """
        Args:
            where: names an item by its number, from 0, for people who read the timings.
        """
        self._source = enumerate(items)
        self._num_items = len(items) if isinstance(items, Sized) else None
        self._timings, self._on_progress, self._where = timings, on_progress, where
        self._scores: dict[int, Score] = {}
        self._heads: dict[int, str] = {}
        self._num_taken = 0
        self._is_exhausted = False
        self._last_report = time.monotonic()

    def take(self) -> tuple[int, Item] | None:
        """The next item with its ticket; None when there is none left."""
        numbered = next(self._source, None)
        if numbered is None:
            self._is_exhausted = True
            return None
        ticket, item = numbered
        self._num_taken += 1
        self._heads[ticket] = item[0][:SHOWN_CHARS]
        return ticket, item

    @property
    def has_more(self) -> bool:
        """Not known to be at its end."""
        return not self._is_exhausted

    @property
    def is_done(self) -> bool:
        return self._is_exhausted and len(self._scores) == self._num_taken

    def note(self, outcome: Outcome) -> None:
        head = self._heads.pop(outcome.ticket)
        self._scores[outcome.ticket] = outcome.score
        if not outcome.is_cached:
            self._timings.add(outcome.score, self._where(outcome.ticket), head)

    def report(self) -> None:
        """Tell the caller how far it is, if it is time for that. What this raises ends the call."""
        now = time.monotonic()
        if self._on_progress is not None and (self.is_done or now - self._last_report >= PROGRESS_S):
            self._on_progress(len(self._scores), self._num_taken if self._num_items is None else self._num_items)
            self._last_report = now

    def scores(self) -> list[Score]:
        assert self.is_done
        return [self._scores[ticket] for ticket in range(self._num_taken)]


def item_number(number: int) -> str:
    return f"item {number}"
