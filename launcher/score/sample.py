"""One completion with its score, wherever it came from."""

from dataclasses import dataclass

from towline.storage.records import Score


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierScore:
    """What another scoring said of the same completion."""

    parts: dict[str, float]
    """Reward part → value; NaN where it failed."""
    total: float | None
    """NaN where it failed; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    where: str
    """File and line, or step, row and number, as a message shows it."""
    prompt: int
    """The same for completions of one prompt, and for no others."""
    completion: str
    gold: str
    score: Score
    earlier: EarlierScore | None
