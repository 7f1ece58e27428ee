"""What one reward function says about one completion."""

from dataclasses import dataclass

from towline.storage.records import ScoreStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    value: float | None
    """None unless the status is OK: a grader that could not decide says so and never answers 0."""
    status: ScoreStatus = ScoreStatus.OK
    seconds: float = 0.0
    """Wall time of the function, measured by whoever called it."""
    detail: str = ""
    """Why: for people, never read by a program."""
