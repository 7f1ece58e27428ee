r"""Pay for the shape of a completion: thinking that is closed, then one boxed answer."""

from towline.rollout.rewards.boxed import THINK_CLOSE, THINK_OPEN, closed_boxes
from towline.rollout.rewards.verdict import Verdict


def grade(completion: str, gold: str) -> Verdict:
    """1.0 for exactly one closed box, after one closed `<think>…</think>` if any think tag is there; else 0.0."""
    problem = _problem(completion)
    return Verdict(value=0.0 if problem else 1.0, detail=problem)


def _problem(completion: str) -> str:
    before, answer = "", completion
    if THINK_OPEN in completion or THINK_CLOSE in completion:
        before, _, rest = completion.partition(THINK_OPEN)
        thinking, _, answer = rest.partition(THINK_CLOSE)
        if completion != f"{before}{THINK_OPEN}{thinking}{THINK_CLOSE}{answer}":
            return "the thinking is not closed"
        if THINK_CLOSE in before or THINK_OPEN in rest or THINK_CLOSE in answer:
            return "more than one pair of think tags"
    boxes = list(closed_boxes(answer))
    if len(boxes) != 1 or any(True for _ in closed_boxes(before)):
        return f"{len(boxes)} boxed answers where one belongs"
    return "" if boxes[0].strip() else "the box is empty"
