"""The whole reward of sampled groups: functions of the text in killable workers, and the parts that count tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path

from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.token_penalty import TokenPenalty
from towline.rollout.scoring import ScoringPool
from towline.storage.records import RolloutGroup, Score


class Grader:
    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        *,
        max_completion_tokens: int,
        num_workers: int,
        limit_s: float,
        folder: Path,
    ) -> None:
        """Start the workers; arguments but `max_completion_tokens` are those of ScoringPool.

        Args:
            rewards: the `[[rewards]]` tables; at least one of them judges the text.
        """
        self.weights = {part.part_name: part.weight for part in rewards}
        penalties = (TokenPenalty.of(part, max_completion_tokens) for part in rewards)
        self._penalties = [penalty for penalty in penalties if penalty is not None]
        self._pool = ScoringPool(
            [part for part in rewards if not part.counts_tokens],
            num_workers=num_workers,
            limit_s=limit_s,
            folder=folder,
        )
        self.code_hash = self._pool.code_hash
        """Fingerprint of what gives the rewards, without their weights."""
        for penalty in self._penalties:
            self.code_hash = penalty.added_to_hash(self.code_hash)

    def score(
        self, groups: Sequence[RolloutGroup], on_progress: Callable[[int, int], None] | None = None
    ) -> list[Score]:
        """Scores of every completion, in order."""
        items = [(group.prompt.answer, completion) for group in groups for completion in group.completions]
        scores = self._pool.score_many([(completion.text, answer) for answer, completion in items], on_progress)
        for penalty in self._penalties:
            scores = [
                penalty.added_to(score, len(completion.token_ids))
                for score, (_, completion) in zip(scores, items, strict=True)
            ]
        return scores

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        self._pool.close()
