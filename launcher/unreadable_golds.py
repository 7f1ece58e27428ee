"""Gold answers that a built-in reward cannot read: no completion is ever paid for them.

A user's own reward is asked nothing here: its code runs in scorers only, and `towline score --dry-run` tries it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.mixture import BUILT_IN, judge, load_reward
from towline.storage.records import Prompt, ScoreStatus

MAX_ASKED = 20_000
"""Rows of a dataset, evenly over it: some tens of microseconds each."""
_NO_ANSWER = ""
"""Costs next to nothing to grade, once the gold answer is read."""
MAX_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableGolds:
    reward: str
    num: int
    num_asked: int
    row: int
    """The first of them."""
    gold: str
    why: str

    @property
    def share(self) -> float:
        return self.num / self.num_asked

    def __str__(self) -> str:
        shown = " ".join(self.gold.split())[:MAX_SHOWN_CHARS]
        return (
            f"{self.num:,} of {self.num_asked:,} gold answers cannot be read by {self.reward}, and no completion is "
            f"paid for them. Row {self.row}, {shown!r}: {self.why}. Mend these rows, or leave them out."
        )


def unreadable_golds(rewards: Sequence[RewardConfig], prompts: Sequence[Prompt]) -> Iterator[UnreadableGolds]:
    """For each built-in reward that fails, whatever the completion says."""
    asked = prompts[:: -(-len(prompts) // MAX_ASKED) or 1]
    for use in dict.fromkeys(reward.use for reward in rewards if reward.use in BUILT_IN):
        function = load_reward(use, Path())
        verdicts = [(prompt, judge(function, _NO_ANSWER, prompt.answer)) for prompt in asked]
        failed = [(prompt, verdict) for prompt, verdict in verdicts if verdict.status is not ScoreStatus.OK]
        if failed:
            prompt, verdict = failed[0]
            yield UnreadableGolds(
                reward=use,
                num=len(failed),
                num_asked=len(asked),
                row=prompt.row,
                gold=prompt.answer,
                why=verdict.detail,
            )
