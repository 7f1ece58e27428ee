r"""A second, stricter opinion for held-out suites: the box must hold the gold answer, character by character.

It shares no comparison code with `math_answer`: a policy that has learnt to please that grader's leniency gains
nothing here. So equal values in other forms (`1/2`, `0.5`) are different answers, on purpose.
"""

import re

from towline.rollout.rewards.boxed import last_boxed
from towline.rollout.rewards.verdict import Verdict
from towline.storage.errors import DataError

_GROUPED = re.compile(r"[-+]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?")


def grade(completion: str, gold: str) -> Verdict:
    expected = _canonical(_gold_answer(gold))
    if not expected:
        raise DataError(f"the gold answer is empty: {gold[-200:]!r}; give each row of the dataset an answer")
    boxed = last_boxed(completion)
    if boxed is None:
        return Verdict(value=0.0, detail="no boxed answer")
    return Verdict(value=float(_canonical(boxed) == expected))


def _gold_answer(gold: str) -> str:
    """The dataset's answer itself, out of a worked solution that ends in `#### 72` or in a box."""
    final = gold.rpartition("####")[2]
    boxed = last_boxed(final)
    return final if boxed is None else boxed


def _canonical(answer: str) -> str:
    """Strip, collapse white space, fold case; `14,250` is 14250 only when digit groups are the whole answer."""
    text = " ".join(answer.split()).casefold()
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text
