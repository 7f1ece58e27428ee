"""Grade 1,000 good, wrong and hostile answers through two workers, and print as JSON what came of it: FOLDER."""

import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import psutil

from scoring_pools import children, rewards
from towline.rollout.scoring import ScoringPool
from towline.storage.records import ScoreStatus

LIMIT_S = 1.0
HOSTILE = [
    # Power towers, factorials and their like.
    *("9^{9^{9^{9}}}", "7^{\\left(7^{\\left(7^{\\left(7^7\\right)}\\right)}\\right)}", "(10^9)!", "(((3!)!)!)!"),
    *("10^{10^{10}}", "2^{10^{12}}", "0.1^{99999999}", "(1+\\sqrt2)^{5000000}", "\\binom{10^9}{5\\cdot10^8}"),
    *("\\sum_{k=1}^{10^9} \\frac{1}{k^2}", "(x+y+z+1)^{400}", "\\sin(10^{10^{8}})", "9" * 100_000, "1e999999999"),
    # Deep nesting.
    *("(" * 5_000 + "1" + ")" * 5_000, "\\frac{" * 500 + "1" + "}{2}" * 500, "\\sqrt{" * 300 + "2" + "}" * 300),
    *("{" * 20_000, "}" * 20_000, "\\left(" * 2_000, "-" * 50_000 + "1", "[" * 3_000 + "]" * 3_000),
    # Code.
    *("__import__('os').system('touch HACKED')", "().__class__.__bases__[0].__subclasses__()", "eval('1')"),
    *("lambda: (yield)", "exec(\"import os; os._exit(0)\")", "\\input{/etc/passwd}", "\\write18{touch HACKED}"),
    *("open('HACKED','w')", "{{7*7}}", "'; DROP TABLE scores; --", "%s%s%s%n", "${jndi:ldap://x}"),
    # Broken text.
    *("\ud800", "4\udfff2", "\0", "4\x002", "\ufeff42\u202e", "4\u200b2" * 1_000, "\x1b[2J", "٤٢", "\u2028\u2029"),
    *("a\u0301" * 10_000, "\\boxed{" * 1_000, "#### " * 10_000, "\\boxed{\\boxed{", "</think>" * 10_000),
    # Megabytes.
    *("1" * 2**20, "x+" * 2**19 + "x", "\\frac{1}{2}" * 100_000, " " * 2**21, "é" * 2**20, "\ud800" * 2**20),
    *("{" * 2**20, "\\boxed{1}" * 2**17, "9" * 2**23, "<think>" * 2**17),
]  # fmt: skip


def good(number: int) -> tuple[str, str]:
    forms = (
        (f"so \\boxed{{{number}}}", f"{number}"),
        (f"\\boxed{{\\frac{{{2 * number}}}{{4}}}}", f"\\frac{{{number}}}{{2}}"),
        (f"<think>\\boxed{{0}}</think> \\boxed{{{number}.50}}", f"#### {number}.5"),
        (f"it is \\boxed{{{1000 + number:,}}}", f"{1000 + number}"),
    )
    return forms[number % len(forms)]


def wrong(number: int) -> tuple[str, str]:
    forms = (
        (f"so \\boxed{{{number}}}", f"{number + 1}"),
        (f"no box, {number}", f"{number}"),
        (f"\\boxed{{\\frac{{{number + 1}}}{{7}}}}", f"\\frac{{{number + 1}}}{{8}}"),
        (f"<think>\\boxed{{{number}}}", f"{number}"),
    )
    return forms[number % len(forms)]


def hostile(number: int) -> tuple[str, str]:
    text = HOSTILE[number % len(HOSTILE)]
    return (f"I say \\boxed{{{text}}}", "42") if number % 2 else (f"{text} {number}", "42")


def main() -> None:
    folder = Path(sys.argv[1])
    kinds = ["good"] * 500 + ["wrong"] * 300 + ["hostile"] * 200
    order = [kinds[number * 7 % 1000] for number in range(1000)]
    make = {"good": good, "wrong": wrong, "hostile": hostile}
    count: Counter[str] = Counter()

    def items():
        for kind in order:
            yield make[kind](count[kind])
            count[kind] += 1

    largest: dict[str, float] = {"worker_mib": 0.0}
    ended = threading.Event()
    with ScoringPool(rewards("math_answer"), 2, LIMIT_S, folder) as pool:
        watch = threading.Thread(target=_watch, args=(ended, largest))
        watch.start()
        began = time.monotonic()
        scores = pool.score_many(items())
        took_s = time.monotonic() - began
        ended.set()
        watch.join()
    of_kind = {kind: [score for score, one in zip(scores, order, strict=True) if one == kind] for kind in make}
    print(
        json.dumps(
            {
                "num_scores": len(scores),
                "totals": {
                    kind: Counter(str(score.total) for score in found) for kind, found in of_kind.items()
                },
                "statuses": Counter(ScoreStatus(score.status).name for score in of_kind["hostile"]),
                "longest_s": max(score.seconds for score in scores if score.seconds == score.seconds),
                "limit_s": LIMIT_S,
                "took_s": took_s,
                "parent_mib": _peak_mib(),
                **largest,
                "left": sorted(children()),
            }
        )
    )  # fmt: skip


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def _watch(ended: threading.Event, largest: dict[str, float]) -> None:
    while not ended.wait(0.02):
        for pid in children():
            try:
                resident = psutil.Process(pid).memory_info().rss / 2**20
            except psutil.Error:
                continue
            largest["worker_mib"] = max(largest["worker_mib"], resident)


main()
