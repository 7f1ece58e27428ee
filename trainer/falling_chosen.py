"""DPO may win by making both completions unlikely: a word on it where the chosen ones fall too."""

from collections.abc import Iterable
from dataclasses import dataclass, field

FALLING_STEPS = 10


@dataclass(slots=True)
class FallingChosen:
    """A rule over the steps so far, and a sentence; once it fired it is silent until the rule stops to hold."""

    _rewards: list[float] = field(default_factory=list[float])
    _fired: bool = False

    def recall(self, rewards: Iterable[float]) -> None:
        """Of the steps of earlier attempts: what was said of them is not said again."""
        for step, reward in enumerate(rewards):
            self.judge(step, reward)

    def judge(self, step: int, chosen_reward: float) -> str | None:
        """
        Args:
            chosen_reward: beta x (log-prob - the reference's), mean over the chosen completions of the step.
        """
        self._rewards.append(chosen_reward)
        recent = self._rewards[-FALLING_STEPS:]
        holds = len(recent) == FALLING_STEPS and all(reward < 0 for reward in recent)
        is_new, self._fired = holds and not self._fired, holds
        if not is_new:
            return None
        return (
            f"step {step}: for {FALLING_STEPS} steps the chosen completions have been less likely than under the "
            f"reference (reward {recent[-1]:.3g}): the margin grows because the rejected ones fall faster. Look at "
            "what the model writes; a larger trainer.beta, a lower learning rate, or SFT on the chosen ones first "
            "holds them"
        )
