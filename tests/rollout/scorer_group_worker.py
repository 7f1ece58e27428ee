"""One rank of a scorer group, under `mpirun`: FOLDER WHAT. Rank 0 writes what came of it to FOLDER."""

import json
import sys
from pathlib import Path

from mpi4py import MPI

from scoring_pools import children, rewards
from towline.rollout.scorer_group import ScorerGroup
from towline.rollout.scoring import ScoringPool
from towline.rollout.scoring_messages import score_fields
from towline.storage.errors import ConfigError, TowlineError
from towline.storage.records import Score

folder = Path(sys.argv[1])
world = MPI.COMM_WORLD
MIXED = [
    *((f"value {number}", f"gold {number % 7}") for number in range(300)),
    ("no_such_deed", ""),
    ("leave 4", ""),
    ("value " + " " * 500_000 + "6", "\ud800 \0 é"),
    ("loop", ""),
    *((f"value {number}", "again") for number in range(50)),
]
SLOW_FIRST = [("sleep_and_tell 6.0", ""), *((f"sleep_and_tell 0.0{number % 3}", f"{number}") for number in range(150))]


def make_pool(limit_s: float = 1.5) -> ScoringPool:
    return ScoringPool(rewards("hostile.py:grade"), 1, limit_s, folder)


def serve_or(group: ScorerGroup, name: str) -> None:
    if not group.is_first:
        group.serve()
        return
    write(name, globals()[name](group))


def write(name: str, value: object) -> None:
    (folder / f"{name}-{world.size}.{world.rank}.json").write_text(json.dumps(value))


def told(score: Score) -> dict[str, object]:
    """Without what depends on the clock."""
    return {key: value for key, value in score_fields(score).items() if key not in ("seconds", "part_seconds")}


def mixed(group: ScorerGroup) -> object:
    scores = [told(score) for score in group.score_many(iter(MIXED))]
    with make_pool() as pool:
        alone = [told(score) for score in pool.score_many(MIXED)]
    num_timed = group.timings.latencies()["hostile.grade"].num_scored
    return {"group": repr(scores), "alone": repr(alone), "num_timed": num_timed}


def balance(group: ScorerGroup) -> object:
    return [int(score.total) for score in group.score_many(SLOW_FIRST)]


def interrupted(group: ScorerGroup) -> object:
    def stop(num_done: int, num_items: int) -> None:
        raise FileNotFoundError

    try:
        group.score_many([("sleep 0.4", f"{number}") for number in range(12)], stop)
    except FileNotFoundError:
        return [score.total for score in group.score_many([(f"value {number}", "then") for number in range(12)])]
    return "the error did not come out"


def fails(group: ScorerGroup) -> object:
    return len(group.score_many([("sleep 0.02", f"{number}") for number in range(200)]))


def main() -> None:
    with ScorerGroup(world, make_pool) as group:
        if group.is_first:
            for name in ("mixed", "interrupted"):
                serve_or(group, name)
        else:
            group.serve()
    with ScorerGroup(world, lambda: make_pool(60.0)) as group:
        serve_or(group, "balance")
    write("left", sorted(children()))
    last = world.size - 1
    try:
        with ScorerGroup(world, make_pool) as group:
            if world.rank == last:
                group._pool.collect = _fail  # pyright: ignore[reportAttributeAccessIssue]
            serve_or(group, "fails")
        write("failure", "none")
    except (TowlineError, ZeroDivisionError) as error:
        write("failure", f"{type(error).__name__}: {error}")
    try:
        ScorerGroup(world, make_pool if world.rank != last else _refuse)
        write("refusal", "none")
    except ConfigError as error:
        write("refusal", str(error))


def _fail(wait_s: float) -> list[object]:
    raise ZeroDivisionError("on the last rank")


def _refuse() -> ScoringPool:
    raise ConfigError("no such reward here")


main()
