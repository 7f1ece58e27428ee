"""Programs and their tests behind walls: how long one takes, how many a second, and what the sandbox costs.

    python tests/bench/code_rewards.py [--check] [--rounds N]

A warm execution is a trivial solution with two asserts, from code and tests to the verdict with everything cleaned up.
It is measured in turn with `python -c pass`, which does nothing at all, and with the same solution and asserts in a
cold interpreter that puts up the same walls and lets tests and solution share a process. HumanEval goes through the
scoring service as in a run. --check exits 1 if a bar is missed.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import humaneval
import towline
from towline.rollout.rewards.code_tests import run_stdio, run_tests
from towline.rollout.rewards.config import RewardConfig
from towline.rollout.sandbox.limits import Limits
from towline.rollout.sandbox.sandbox import open_sandbox, sandbox
from towline.rollout.scoring import ScoringPool

CODE = "def twice(number): return 2 * number"
TESTS = ["assert twice(3) == 6", "assert twice(50) == 100"]
HANG = "def twice(number):\n    while True: pass"
HANG_LIMIT_S = 0.2
COLD = r"""
import sys
sys.path.append(sys.argv[1])
from pathlib import Path
from towline.rollout.sandbox import landlock, limits, namespaces, seccomp
from towline.rollout.sandbox.zygote import _SYSTEM_FILES, _standard_library
readable = [Path(path) for path in (*_SYSTEM_FILES, *_standard_library())]
walls = seccomp.Filter()
used = limits.used_bytes()
limits.confine_template()
{"landlock": landlock, "namespaces": namespaces}[sys.argv[2]].confine(readable, [Path("/dev/null")])
limits.confine(4.0, used + 2**30)
walls.confine()
exec(sys.argv[3])
"""
BARS = {"code_round_trip": 0.5, "code_humaneval": 3.0}
"""Share of a bare interpreter's time, at most; seconds for 164 tasks with two workers, at most."""
NUM_PASSES = 3


def ms(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return 1000 * (time.perf_counter() - began)


def bare() -> None:
    subprocess.run([sys.executable, "-c", "pass"], check=True)


def cold() -> None:
    package, whole = str(Path(towline.__path__[0]).parent), "\n".join([CODE, *TESTS])
    files = sandbox().isolation.files
    subprocess.run([sys.executable, "-S", "-B", "-P", "-c", COLD, package, files, whole], check=True)


def warm() -> None:
    assert run_tests(CODE, TESTS).value == 1.0


def stdio() -> None:
    assert run_stdio("print(2 * int(input()))", [("3\n", "6\n")]).value == 1.0


def hang_and_go_on() -> None:
    assert run_tests(HANG, TESTS, Limits(seconds=HANG_LIMIT_S)).value == 0.0
    warm()


def fresh_sandbox() -> None:
    open_sandbox().close()


def in_turn(rounds: int, actions: dict[str, tuple[Callable[[], object], int]]) -> dict[str, list[float]]:
    """ms of each action, each done so many times a round."""
    found: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, (action, times) in actions.items():
            found[name] += [ms(action) for _ in range(times)]
    return found


def row(name: str, times: Iterable[float]) -> str:
    ordered = sorted(times)
    p50, p99 = (ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99))
    return f"{name:44}{p50:10.2f}{p99:10.2f}{ordered[-1]:10.2f}"


def held_mib(process: str, which: str = "VmRSS:") -> float:
    return int(Path(f"/proc/{process}/status").read_text().partition(which)[2].split()[0]) / 1024


def executions_a_second(num_workers: int, count: int, folder: Path) -> float:
    rewards = [RewardConfig(use="code_tests", weight=1.0)]
    with ScoringPool(rewards, num_workers, 60.0, folder) as pool:
        items = [(f"{CODE}  # {number}", json.dumps(TESTS)) for number in range(count)]
        pool.score_many(items[:num_workers])
        seconds = ms(lambda: [score.total for score in pool.score_many(items[num_workers:])]) / 1000
    return (count - num_workers) / seconds


def humaneval_seconds(num_workers: int, folder: Path) -> list[float]:
    """Of each pass over the 164 tasks; the pool answers nothing from its memory."""
    rewards = [RewardConfig(use="code_tests", weight=1.0, limit_s=20.0)]
    rows = humaneval.rows()
    found: list[float] = []
    with ScoringPool(rewards, num_workers, 60.0, folder) as pool:
        pool.score_many([(CODE, json.dumps(TESTS))])
        for number in range(NUM_PASSES):
            items = [(f"{row['canonical_solution']}    # {number}", json.dumps(row)) for row in rows]
            began = time.perf_counter()
            scores = pool.score_many(items)
            found.append(time.perf_counter() - began)
            assert [score.total for score in scores] == [1.0] * 164
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()

    own = sandbox()
    print(f"isolation: {own.isolation}")
    for action in (bare, cold, warm, stdio):
        action()
    before = held_mib("self")
    actions = {
        "warm, two asserts": (warm, 3),
        "warm, standard input": (stdio, 1),
        "cold interpreter, the same walls": (cold, 1),
        "python -c pass": (bare, 1),
    }
    found = in_turn(options.rounds, actions)
    found |= in_turn(5, {"a hang, beyond its limit, and the next verdict": (hang_and_go_on, 1)})
    hang = found["a hang, beyond its limit, and the next verdict"]
    hang[:] = [one - 1000 * HANG_LIMIT_S for one in hang]
    found |= in_turn(5, {"start of a sandbox, tried and ended": (fresh_sandbox, 1)})
    print(f"{'ms':44}{'p50':>10}{'p99':>10}{'worst':>10}")
    for name, times in found.items():
        print(row(name, times))
    grown = held_mib("self") - before
    print(f"memory, MiB: zygote {held_mib(str(own._process.pid)):.1f}, growth of this process {grown:.1f}")

    with tempfile.TemporaryDirectory() as folder:
        for num_workers in (1, 2):
            rate = executions_a_second(num_workers, 5 * options.rounds, Path(folder))
            print(f"executions/s with {num_workers} workers of the scoring service: {rate:.0f}")
        passes = humaneval_seconds(2, Path(folder))
    print(f"HumanEval, 164 solutions, 2 workers, s: {', '.join(f'{one:.2f}' for one in passes)}")
    figures = {
        "code_round_trip": statistics.median(found["warm, two asserts"]) / statistics.median(found["python -c pass"]),
        "code_humaneval": statistics.median(passes),
    }
    for name, figure in figures.items():
        print(f"{name} {figure:.2f} bar {BARS[name]:.2f}")
    return int(options.check and any(figure > BARS[name] for name, figure in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
