r"""Grade a mathematical answer: whether what a completion commits itself to equals the gold answer.

Finding the answer is apart from comparing it. What notation is read how is in docs/rewards.md; how equality is decided,
in `mathematics.equality`. There is no evaluator of strings, the work is bounded before it is done, and the verdict is
the same in every thread and process. A box wins over a `#### 72` line; only what follows the thinking is read.
"""

from towline.rollout.rewards.boxed import after_thinking, boxed_answer
from towline.rollout.rewards.mathematics.answers import NotRead, Words
from towline.rollout.rewards.mathematics.comparison import Comparison, compare
from towline.rollout.rewards.mathematics.reading import read
from towline.rollout.rewards.verdict import Verdict
from towline.storage.records import ScoreStatus

ANSWER_MARK = "####"
GOLD_UNPARSEABLE = "gold_unparseable"
"""How the detail of a verdict begins when the fault is the dataset's: no completion can be right."""
MAX_SHOWN_CHARS = 100


def grade(completion: str, gold: str) -> Verdict:
    """1.0 if the completion's final answer equals the gold answer, 0.0 if not, FAILED if that cannot be told."""
    wanted = gold_answer(gold)
    problem = _problem_of_gold(wanted)
    if problem:
        return _failed(f"{GOLD_UNPARSEABLE}: {problem}: {wanted[:MAX_SHOWN_CHARS]!r}")
    found = final_answer(completion)
    verdict = Comparison(False) if found is None else compare(found, wanted)
    if not verdict.is_equal and isinstance(read(wanted)[0], NotRead):
        return _failed(f"{GOLD_UNPARSEABLE}: it is no answer of a known form: {wanted[:MAX_SHOWN_CHARS]!r}")
    if found is None:
        return Verdict(value=0.0, detail="no boxed answer")
    if verdict.is_equal is None:
        pair = f"{found[:MAX_SHOWN_CHARS]!r} equals {wanted[:MAX_SHOWN_CHARS]!r}"
        return _failed(f"cannot tell whether {pair}: {verdict.reason}")
    return Verdict(value=float(verdict.is_equal))


def equivalent(prediction: str, gold: str) -> bool | None:
    """Compare two answers; None if it cannot be told, and `compare` says why."""
    return compare(prediction, gold).is_equal


def gold_answer(gold: str) -> str:
    """The answer itself, out of a plain answer or a worked solution that ends in `#### 72` or in a box."""
    final = gold.rpartition(ANSWER_MARK)[2]
    boxed = boxed_answer(final)
    return (final if boxed is None else boxed).strip()


def final_answer(completion: str) -> str | None:
    """The last box, or the last boxes if they stand as one list; without any, the rest of the line after `####`."""
    boxed = boxed_answer(completion)
    if boxed is not None:
        return boxed
    _, mark, rest = (after_thinking(completion) or "").rpartition(ANSWER_MARK)
    return rest.strip(" \t").partition("\n")[0].strip() or None if mark else None


def _problem_of_gold(wanted: str) -> str:
    if not wanted:
        return "the gold answer is empty"
    readings = read(wanted)
    if all(isinstance(reading, Words) and reading.is_prose for reading in readings):
        return "the gold answer is prose"
    if isinstance(readings[0], NotRead) and not _is_whole(wanted):
        return "the gold answer is broken"
    return ""


def _is_whole(text: str) -> bool:
    """Whether notation that is not read could be an answer all the same: as many brackets open as close."""
    num_open, num_closed = (sum(text.count(bracket) for bracket in brackets) for brackets in ("([{", ")]}"))
    return num_open == num_closed and any(character.isalnum() for character in text)


def _failed(detail: str) -> Verdict:
    return Verdict(value=None, status=ScoreStatus.FAILED, detail=detail)
