"""End a run whose rewards fail too often. Failed scores are left out of a step; where they are many, what is left is
not what the policy wrote but what the grader can read, and the reward needs mending."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from towline.rollout.evaluation.statistics import accuracy_interval
from towline.storage.errors import FailedScoresError
from towline.storage.records import ScoreStatus
from towline.trainer.rollout_batch import ScoredGroup

WINDOW_STEPS = 10
SURE_Z = 3.29
"""0.05 % on one side: few completions may fail by chance, and there is a look at every step."""
NUM_EXAMPLES = 3
EXAMPLE_CHARS = 60


@dataclass(slots=True)
class FailedScores:
    """Counts over the last steps of this attempt. It sees sealed scores alone, so every rank comes to the same verdict.

    Args:
        max_share: scoring.max_failed.
    """

    max_share: float
    _counts: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    """Of each step: failed, all."""

    def judge(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """
        Args:
            groups: all that were drawn for the step.

        Raises:
            FailedScoresError: surely more than `max_share` of the completions have no score; three are named.
        """
        scores = [score for scored in groups for score in scored.scores]
        self._counts.append((sum(score.status is not ScoreStatus.OK for score in scores), len(scores)))
        num_failed, num_scored = (sum(counts) for counts in zip(*self._counts, strict=True))
        if num_failed and accuracy_interval(num_failed, num_scored, SURE_Z).low > self.max_share:
            raise FailedScoresError(self._why(step, groups, num_failed, num_scored))

    def _why(self, step: int, groups: Sequence[ScoredGroup], num_failed: int, num_scored: int) -> str:
        over = f" of the last {len(self._counts)} steps" if len(self._counts) > 1 else ""
        return "\n".join(
            [
                f"step {step}: {num_failed} of {num_scored} completions{over} could not be scored "
                f"({100 * num_failed / num_scored:.0f} %), and scoring.max_failed allows {100 * self.max_share:g} %",
                *examples(groups),
                "  mend the reward, or raise scoring.limit_s or scoring.max_failed. All of them: towline samples "
                f"--step {step} --failed",
            ]
        )


def examples(groups: Sequence[ScoredGroup]) -> list[str]:
    """Failed completions in words, different reasons first."""
    failed = [
        (scored.group.prompt.row, number, completion.text, score.detail)
        for scored in groups
        for number, (completion, score) in enumerate(zip(scored.group.completions, scored.scores, strict=True))
        if score.status is not ScoreStatus.OK
    ]
    told: set[str] = set()
    first = [one for one in failed if not (one[3] in told or told.add(one[3]))]
    others = [one for one in failed if one not in first]
    return [
        f"  row {row}, completion {number} {text[:EXAMPLE_CHARS]!r}: {' '.join(detail.split()) or 'no reason given'}"
        for row, number, text, detail in [*first, *others][:NUM_EXAMPLES]
    ]
