"""Signs that a policy has found what a reward model overrates: its scores rise, and what they were to measure does not.

Goodhart's law, as measured by Gao et al. (2022, arXiv:2210.10760): the score that is trained on rises throughout, that
of a better judge rises at first and then falls. Means of windows of steps are compared, in units of the spread of the
scores, for one step's mean is as good as its prompts.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

WINDOW_STEPS = 10
ROSE = 0.25
"""By so many of its standard deviations a score must have risen. With 64 completions a step a window's mean is off by a
twenty-fifth of one."""
NARROWED = 0.8
"""Of its standard deviation is left; with 64 completions a step a window's is off by a thirtieth."""


@dataclass(frozen=True, slots=True)
class _Window:
    mean: Mapping[str, float]
    """Part → mean score over the window's steps."""
    spread: Mapping[str, float]
    """Part → standard deviation within a step, mean over the steps."""


@dataclass(slots=True)
class OverOptimisation:
    """
    Args:
        trained: names of the reward parts that are reward models and are trained on.
        watching: names of those that are recorded only.
    """

    trained: tuple[str, ...]
    watching: tuple[str, ...]
    _steps: deque[Mapping[str, float]] = field(default_factory=lambda: deque(maxlen=2 * WINDOW_STEPS))
    _now: _Window | None = None
    """The last steps; None until there is a window before them."""
    _widest: dict[str, _Window] = field(default_factory=dict[str, _Window])
    """Trained part → of the windows before `_now`, the one in which its scores were spread most."""
    _best: dict[str, _Window] = field(default_factory=dict[str, _Window])
    """Watching part → the one in which its mean was highest."""

    def note(self, metrics: Mapping[str, float]) -> None:
        """A step, in order. One in which a part has no score at all is left out."""
        values = [metrics.get(f"reward/{what}/{name}", math.nan) for what in ("part", "spread") for name in self._names]
        if not all(map(math.isfinite, values)):
            return
        self._steps.append(metrics)
        if len(self._steps) < 2 * WINDOW_STEPS:
            return
        steps = list(self._steps)
        before, self._now = self._window(steps[:WINDOW_STEPS]), self._window(steps[WINDOW_STEPS:])
        for name in self.trained:
            if name not in self._widest or before.spread[name] > self._widest[name].spread[name]:
                self._widest[name] = before
        for name in self.watching:
            if name not in self._best or before.mean[name] > self._best[name].mean[name]:
                self._best[name] = before

    def narrowing(self) -> str | None:
        """A sentence where a trained score's spread has narrowed while its mean rose."""
        for name, before in self._widest.items():
            assert self._now is not None
            is_narrower = self._now.spread[name] <= NARROWED * before.spread[name]
            if is_narrower and _has_risen(name, before, self._now):
                return (
                    f"the scores of {name} have come together, to a spread of {self._now.spread[name]:.3g} from "
                    f"{before.spread[name]:.3g}, while their mean rose from {before.mean[name]:.3g} to "
                    f"{self._now.mean[name]:.3g}: the policy may have found what the reward model overrates. Look at "
                    f"what it writes (towline samples){self._and_at_watchers()}; a larger kl_beta or an earlier "
                    "checkpoint hold it nearer to what the reward model was trained on"
                )
        return None

    def dissent(self) -> str | None:
        """A sentence where a trained score has risen and a watching one has not."""
        for watcher, before in self._best.items():
            assert self._now is not None
            for name in self.trained:
                if self._now.mean[watcher] <= before.mean[watcher] and _has_risen(name, before, self._now):
                    return (
                        f"the scores of {name} have risen from {before.mean[name]:.3g} to {self._now.mean[name]:.3g} "
                        f"while those of {watcher}, which is not trained on, went from {before.mean[watcher]:.3g} to "
                        f"{self._now.mean[watcher]:.3g}: what the policy learns pleases one reward model alone. Go on "
                        "from an earlier checkpoint, with a larger kl_beta or a reward model trained on what the "
                        "policy writes now"
                    )
        return None

    @property
    def _names(self) -> tuple[str, ...]:
        return (*self.trained, *self.watching)

    def _window(self, steps: list[Mapping[str, float]]) -> _Window:
        def mean(what: str) -> dict[str, float]:
            return {name: sum(step[f"reward/{what}/{name}"] for step in steps) / len(steps) for name in self._names}

        return _Window(mean("part"), mean("spread"))

    def _and_at_watchers(self) -> str:
        return f" and at whether {' and '.join(self.watching)} rose with it" if self.watching else ""


def _has_risen(name: str, before: _Window, now: _Window) -> bool:
    rise = now.mean[name] - before.mean[name]
    return rise > 0 and rise >= ROSE * before.spread[name]
