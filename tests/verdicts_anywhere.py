"""Score a few answers through a pool, in the process that WHAT says, and print the verdicts as JSON: FOLDER WHAT."""

import json
import multiprocessing
import sys
from pathlib import Path

from scoring_pools import rewards
from towline.rollout.scoring import ScoringPool

ITEMS = [
    *(("\\boxed{14,250}", "#### 14250"), ("\\boxed{7}", "8"), ("\\boxed{\\frac{1}{2}}", "0.5"), ("no box", "1")),
    *(("\\boxed{\\ud800}", "3"), ("\\boxed{" + "9" * 5_000 + "}", "3"), ("\\boxed{\\frac{", "3")),
]  # fmt: skip


def verdicts(folder: str) -> str:
    with ScoringPool(rewards("math_answer", "format", "mine.py:grade"), 2, 1.0, Path(folder)) as pool:
        scores = pool.score_many([*ITEMS, ("hang", "1"), ("raise", "1")])
        return json.dumps([repr(pool.code_hash), *(repr((s.parts, s.status, s.total, s.detail)) for s in scores)])


if __name__ == "__main__":
    folder, what = sys.argv[1:]
    if what == "here":
        print(verdicts(folder))
    else:
        with multiprocessing.get_context(what).Pool(1) as pool:
            print(pool.apply(verdicts, [folder]))
