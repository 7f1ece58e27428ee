"""The whole reward of sampled groups: functions of the text in killable workers, and the parts that count tokens."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.token_penalty import TokenPenalty
from towline.rollout.score_call import OnProgress
from towline.rollout.score_timings import ScoreTimings
from towline.rollout.scoring import DEFAULT_MEMORY_GIB, ScoringPool
from towline.storage.ledger import ScoreSheet, Shard
from towline.storage.records import RolloutGroup, Score

if TYPE_CHECKING:
    from towline.rollout.scorer_group import ScorerGroup

MakeScorer = Callable[[Callable[[], ScoringPool]], "ScoringPool | ScorerGroup"]


def one_pool(make_pool: Callable[[], ScoringPool]) -> ScoringPool:
    return make_pool()


class Grader:
    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        *,
        max_completion_tokens: int,
        num_workers: int,
        limit_s: float,
        folder: Path,
        memory_gib: float = DEFAULT_MEMORY_GIB,
        make_scorer: MakeScorer = one_pool,
    ) -> None:
        """Start the workers; arguments but the first, the second and the last are those of ScoringPool.

        Args:
            rewards: the `[[rewards]]` tables; at least one of them judges the text.
            make_scorer: makes what scores, of what makes a pool and can be pickled; such as a ScorerGroup over several
                ranks.
        """
        self.weights = {part.part_name: part.weight for part in rewards}
        penalties = (TokenPenalty.of(part, max_completion_tokens) for part in rewards)
        self._penalties = [penalty for penalty in penalties if penalty is not None]
        of_text = [part for part in rewards if not part.counts_tokens]
        self.scorer = make_scorer(partial(ScoringPool, of_text, num_workers, limit_s, folder, memory_gib))
        self.code_hash = self.scorer.code_hash
        """Fingerprint of what gives the rewards, without their weights."""
        for penalty in self._penalties:
            self.code_hash = penalty.added_to_hash(self.code_hash)

    @property
    def why_slow_starts(self) -> str:
        """As of ScoringPool."""
        return self.scorer.why_slow_starts

    @property
    def isolation(self) -> str:
        """As of ScoringPool."""
        return self.scorer.isolation

    @property
    def timings(self) -> ScoreTimings:
        """Of all that was graded so far."""
        return self.scorer.timings

    def score(
        self,
        groups: Sequence[RolloutGroup],
        on_progress: OnProgress | None = None,
        where: str = "",
    ) -> list[Score]:
        """Scores of every completion, in order.

        Args:
            where: what the groups are of, such as "step 3, "; for people who read the timings.
        """
        members = [(group.prompt, number, one) for group in groups for number, one in enumerate(group.completions)]

        def name(index: int) -> str:
            prompt, number, _ = members[index]
            return f"{where}row {prompt.row}, completion {number}"

        scores = self.scorer.score_many([(one.text, prompt.answer) for prompt, _, one in members], on_progress, name)
        for penalty in self._penalties:
            scores = [
                penalty.added_to(score, len(completion.token_ids))
                for score, (_, _, completion) in zip(scores, members, strict=True)
            ]
        return scores

    def sheet(self, shard: Shard, on_progress: OnProgress | None = None, where: str = "") -> ScoreSheet:
        """The scores of a shard with what gave them, to be sealed beside it; arguments are those of `score`."""
        began = time.time()
        scores = self.score(shard.groups, on_progress, where)
        return ScoreSheet(
            scores=tuple(scores),
            weights=dict(self.weights),
            code_hash=self.code_hash,
            isolation=self.isolation,
            shard_digest=shard.digest,
            began=began,
            ended=time.time(),
        )

    def close(self) -> None:
        """End the workers. Safe to call twice."""
        self.scorer.close()
