"""The part `length` of the reward: it joins the total once the rest of the reward has converged, and stays.

From which step on follows from the sealed scores of the steps before it and from nothing else, so that every rank, a
resumed run and a replay come to the same. The ledger's totals are always without it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from towline.jobs.recorded_wave import RecordedWave
from towline.jobs.work import Workload
from towline.rollout.rewards.config import Convergence
from towline.rollout.rewards.convergence import has_converged
from towline.rollout.rewards.total import Term
from towline.storage.ledger import read_scores
from towline.storage.records import Score


@dataclass(slots=True)
class LengthReward:
    work: Workload
    term: Term
    rule: Convergence
    on_progress: Callable[[], None] = lambda: None
    """Told after each earlier step that was looked at; in a resumed run these are many."""
    _means: list[float] = field(default_factory=list[float], init=False)
    """Of steps 0, 1, ...: mean total of the first wave."""
    _since: int | None = field(default=None, init=False)

    def since(self, step: int) -> int | None:
        """The step from which on it counts, if it does in `step`.

        Raises:
            LedgerError: scores of an earlier step are missing or damaged.
        """
        while self._since is None and len(self._means) < step:
            self._means.append(self._mean_reward(len(self._means)))
            self._since = len(self._means) if has_converged(self._means, self.rule) else None
            self.on_progress()
        return self._since if self._since is not None and self._since <= step else None

    def joined(self, step: int, wave: RecordedWave) -> RecordedWave:
        """The wave with the totals that the step is trained on."""
        if self.since(step) is None:
            return wave
        groups = [replace(scored, scores=tuple(map(self._with_length, scored.scores))) for scored in wave.groups]
        return replace(wave, groups=groups)

    def _with_length(self, score: Score) -> Score:
        return replace(score, total=score.total + self.term.contribution(score.parts))

    def _mean_reward(self, step: int) -> float:
        paths = [self.work.path(chunk) for chunk, _ in self.work.chunks(step)]
        totals = [score.total for path in paths for score in read_scores(path).scores if not math.isnan(score.total)]
        return math.fsum(totals) / len(totals) if totals else math.nan


def length_reward(work: Workload, on_progress: Callable[[], None] = lambda: None) -> LengthReward | None:
    """None where no part of the reward is `length`."""
    for part in work.rewards:
        if part.converged is not None:
            return LengthReward(work, part.term, part.converged, on_progress)
    return None
