"""The verdicts on pairs of answers; in a module that new processes can import, as they cannot a test's own."""

from collections.abc import Sequence

from towline.rollout.rewards.math_answer import grade


def values(pairs: Sequence[tuple[str, str]]) -> list[float | None]:
    """
    Args:
        pairs: gold answer and prediction.
    """
    return [grade(f"\\boxed{{{prediction}}}", gold).value for gold, prediction in pairs]
