"""Which groups a step trains on: all that it drew, or with dynamic sampling the first that have something to teach.

A group of equal rewards has advantages of 0. DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2 and eq. 11) leaves it
out and draws prompts until the batch is full. Here prompts come in waves as large as the batch, at most `max_waves`,
and the batch is a pure function of what was drawn: it is filled by place (wave, chunk, prompt), never by time of
arrival, which would prefer short completions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from towline.trainer.rollout_batch import ScoredGroup, is_useful


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    drawn: list[ScoredGroup]
    """Wave 0, which was drawn whatever came of it: means over it are means over the dataset."""
    trained: list[ScoredGroup]
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """What dynamic sampling did."""


def wants_another_wave(waves: Sequence[Sequence[ScoredGroup]], *, num_wanted: int, max_waves: int) -> bool:
    """Whether a step that has these waves, whole and in order, draws one more.

    Args:
        num_wanted: useful groups of a full batch; as many as a wave has prompts.
    """
    return len(waves) < max_waves and len(_useful(waves)) < num_wanted


def step_batch(waves: Sequence[Sequence[ScoredGroup]], *, num_wanted: int, max_waves: int) -> StepBatch:
    """The batch of a step that draws no further wave.

    With max_waves = 1 it is the wave as it is. Else it is the first `num_wanted` useful groups, or as many as there
    are; when there are none it is wave 0, so that the step is defined, with its KL term, and moves little.
    """
    first = list(waves[0])
    if max_waves == 1:
        return StepBatch(drawn=first, trained=first)
    useful = _useful(waves)
    metrics = {
        "rollouts/waves": float(len(waves)),
        "rollouts/useful": float(len(useful)),
        "rollouts/surplus": float(max(0, len(useful) - num_wanted)),
    }
    return StepBatch(drawn=first, trained=useful[:num_wanted] or first, metrics=metrics)


def _useful(waves: Sequence[Sequence[ScoredGroup]]) -> list[ScoredGroup]:
    return [scored for wave in waves for scored in wave if is_useful(scored)]
