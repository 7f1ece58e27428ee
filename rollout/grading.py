"""The whole reward of sampled groups: functions of the text in killable workers, reward models here, counted tokens."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.model_score import ModelScore, with_model_scores
from towline.rollout.rewards.token_penalty import TokenPenalty
from towline.rollout.rewards.verdict import Verdict
from towline.rollout.score_call import OnProgress
from towline.rollout.score_timings import ScoreTimings
from towline.rollout.scoring import DEFAULT_MEMORY_GIB, ScoringPool
from towline.storage.ledger import ScoreSheet, Shard
from towline.storage.records import Completion, RolloutGroup, Score, ScoreStatus

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
        """Load the reward models and start the workers; arguments but the first, the second and the last are those of
        ScoringPool.

        Args:
            rewards: the `[[rewards]]` tables. Without one that judges the text there are no workers.
            num_workers: the processors that grading may use: workers, and then threads of a reward model.
            make_scorer: makes what scores, of what makes a pool and can be pickled; such as a ScorerGroup over several
                ranks.
        """
        self.weights = {part.part_name: part.weight for part in rewards}
        penalties = (TokenPenalty.of(part, max_completion_tokens) for part in rewards)
        self._penalties = [penalty for penalty in penalties if penalty is not None]
        models = (ModelScore.load(part, num_threads=num_workers) for part in rewards)
        self._models = [model for model in models if model is not None]
        of_text = [part for part in rewards if part.judges_text]
        make_pool = partial(ScoringPool, of_text, num_workers, limit_s, folder, memory_gib)
        self.scorer = make_scorer(make_pool) if of_text else None
        self.code_hash = self.scorer.code_hash if self.scorer else ""
        """Fingerprint of what gives the rewards, without their weights."""
        for part in (*self._models, *self._penalties):
            self.code_hash = part.added_to_hash(self.code_hash)
        self.timings = self.scorer.timings if self.scorer else ScoreTimings()
        """Of all that was graded so far."""

    @property
    def why_slow_starts(self) -> str:
        """As of ScoringPool."""
        return self.scorer.why_slow_starts if self.scorer else ""

    @property
    def isolation(self) -> str:
        """As of ScoringPool."""
        return self.scorer.isolation if self.scorer else ""

    def score(
        self,
        groups: Sequence[RolloutGroup],
        on_progress: OnProgress | None = None,
        where: str = "",
    ) -> list[Score]:
        """Scores of every completion, in order. One that is empty or was taken back is scored as it stands.

        Args:
            where: what the groups are of, such as "step 3, "; for people who read the timings.
        """
        members = [_Member(group, number) for group in groups for number in range(len(group.completions))]

        def name(index: int) -> str:
            return f"{where}row {members[index].group.prompt.row}, completion {members[index].number}"

        stages = _stages(on_progress, num=(self.scorer is not None) + len(self._models))
        scores = [_NOTHING_ASKED] * len(members)
        if self.scorer is not None:
            items = [(member.completion.text, member.group.prompt.answer) for member in members]
            scores = self.scorer.score_many(items, next(stages), name)
        if self._models:
            texts = [member.token_ids for member in members]
            said = [part.model.score(texts, next(stages)) for part in self._models]
            scores = [self._joined(*one) for one in zip(scores, zip(*said, strict=True), strict=True)]
            self._note_times(scores, members, name)
        for penalty in self._penalties:
            scores = [
                penalty.added_to(score, len(member.completion.token_ids))
                for score, member in zip(scores, members, strict=True)
            ]
        return scores

    def _joined(self, score: Score, verdicts: Sequence[Verdict]) -> Score:
        return with_model_scores(score, [part.term for part in self._models], verdicts)

    def _note_times(self, scores: Sequence[Score], members: Sequence["_Member"], name: Callable[[int], str]) -> None:
        """Of reward models: what scores the text notes its own."""
        for index, (score, member) in enumerate(zip(scores, members, strict=True)):
            seconds = {part.term.name: score.part_seconds[part.term.name] for part in self._models}
            self.timings.add(replace(score, part_seconds=seconds), name(index), member.completion.text)

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
        if self.scorer is not None:
            self.scorer.close()


_NOTHING_ASKED = Score(parts={}, part_status={}, part_seconds={}, total=0.0, status=ScoreStatus.OK, seconds=0.0)


@dataclass(frozen=True, slots=True)
class _Member:
    group: RolloutGroup
    number: int

    @property
    def completion(self) -> Completion:
        return self.group.completions[self.number]

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Of prompt and completion, as the engine had them."""
        return np.concatenate([self.group.prompt_token_ids, self.completion.token_ids])


def _stages(on_progress: OnProgress | None, num: int) -> Iterator[OnProgress | None]:
    """For each of several passes over all completions what it tells: together they count up to their number once."""

    def tell(stage: int, done: int, total: int) -> None:
        if on_progress is not None:
            on_progress((stage * total + done) // num, total)

    return (None if on_progress is None else partial(tell, stage) for stage in range(num))
