"""`code_tests` as a part of a run's reward: in the scoring pool's workers, with its options, behind walls or not at
all."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scoring_pools import children, is_running, wait_until
from towline.rollout.rewards.config import RewardConfig
from towline.rollout.rewards.mixture import RewardPart, code_hash, load_reward
from towline.rollout.scoring import ScoringPool
from towline.storage.errors import ConfigError
from towline.storage.records import ScoreStatus

WITHOUT_WALLS = Path(__file__).parents[1] / "without_walls.py"
GOLD = json.dumps(["assert f(2) == 4", "assert f(5) == 10"])
RIGHT, WRONG, HALF = "def f(x): return 2 * x", "def f(x): return 3 * x", "def f(x): return 4"
FOR_EVER = "def f(x):\n    while True: pass"


def table(**options: object) -> RewardConfig:
    return RewardConfig.model_validate({"use": "code_tests", "weight": 1.0} | options)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScoringPool]:
    with ScoringPool([table(limit_s=1.0)], 2, 20.0, tmp_path_factory.mktemp("pool")) as pool:
        yield pool


def test_verdicts_come_back_in_order_with_reasons(pool: ScoringPool) -> None:
    scores = pool.score_many((code, GOLD) for code in (RIGHT, WRONG, FOR_EVER, "prose, no code", RIGHT))
    assert [score.total for score in scores] == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert {score.status for score in scores} == {ScoreStatus.OK}
    assert "test 1 of 2: AssertionError" in scores[1].detail
    assert "not done within 1 s" in scores[2].detail


def test_the_pool_says_what_shuts_programs_in(pool: ScoringPool) -> None:
    assert pool.isolation.startswith("seccomp + ")
    assert pool.isolation.endswith(" + rlimits")


def test_a_gold_answer_without_tests_is_a_failure_and_not_a_zero(pool: ScoringPool) -> None:
    (score,) = pool.score_many([(RIGHT, "[]")])
    assert score.status == ScoreStatus.FAILED
    assert "the gold answer has no tests to run" in score.detail


def test_a_pool_that_closes_leaves_no_sandbox(tmp_path: Path) -> None:
    with ScoringPool([table()], 1, 20.0, tmp_path) as pool:
        pool.score_many([(RIGHT, GOLD)])
        assert pool._template is not None
        template = pool._template._process.pid
        # Not all children of this process: the pool of the other tests may start one meanwhile.
        started = {template, *children(template)}
        assert len(started) >= 3  # template, worker, zygote
    assert wait_until(lambda: not any(is_running(pid) for pid in started))


def test_partial_credit_is_the_share_of_tests_passed(tmp_path: Path) -> None:
    with ScoringPool([table(partial_credit=True)], 1, 20.0, tmp_path) as pool:
        assert [score.total for score in pool.score_many([(HALF, GOLD), (RIGHT, GOLD), (WRONG, GOLD)])] == [0.5, 1, 0]


@pytest.mark.slow
def test_a_smaller_memory_is_enough_for_less(tmp_path: Path) -> None:
    code = "def f(x):\n    y = bytearray(200 * 2**20)\n    return 2 * x"
    for memory_mib, value in ((64, 0.0), (512, 1.0)):
        with ScoringPool([table(memory_mib=memory_mib)], 1, 20.0, tmp_path) as pool:
            (score,) = pool.score_many([(code, GOLD)])
        assert score.total == value


def test_tests_that_may_take_as_long_as_the_whole_completion_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"limit_s = 5 s, and scoring.limit_s is 5 s.*Set scoring.limit_s to 6"):
        ScoringPool([table(limit_s=5.0)], 1, 5.0, tmp_path)


def test_the_options_are_part_of_the_fingerprint() -> None:
    def fingerprint(**options: object) -> str:
        part = table(**options)
        function = load_reward(part.use, Path(), part.options)
        return code_hash([RewardPart(name=part.part_name, weight=1.0, function=function)])

    fingerprints = [
        fingerprint(),
        fingerprint(limit_s=2.0),
        fingerprint(partial_credit=True),
        fingerprint(memory_mib=64),
    ]
    assert len(set(fingerprints)) == 4
    assert fingerprint(limit_s=4.0) == fingerprints[0]


USE_A_POOL = f"""
import sys
from pathlib import Path
from towline.rollout.rewards.config import RewardConfig
from towline.rollout.scoring import ScoringPool
from towline.storage.errors import ConfigError

table = RewardConfig(use="code_tests", weight=1.0, allow_unsandboxed=sys.argv[1] == "allow" or None)
try:
    with ScoringPool([table], 1, 20.0, Path()) as pool:
        scores = pool.score_many([({RIGHT!r}, {GOLD!r}), ({WRONG!r}, {GOLD!r})])
        print(pool.isolation, [score.total for score in scores])
except ConfigError as error:
    print("refused:", error)
"""


def without_walls(*arguments: str, allow: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(WITHOUT_WALLS), *arguments, sys.executable, "-c", USE_A_POOL, allow],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--bare",)])
def test_a_machine_without_walls_is_refused_with_the_reasons_and_the_mend(arguments: tuple[str, ...]) -> None:
    said = without_walls(*arguments, allow="no")
    assert said.startswith("refused: programs cannot be shut in on this machine (landlock: ")
    assert "; namespaces: " in said
    assert "allow_unsandboxed = true" in said


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "isolation"), [((), "seccomp + rlimits"), (("--bare",), "rlimits")])
def test_it_is_used_where_that_is_allowed(arguments: tuple[str, ...], isolation: str) -> None:
    assert without_walls(*arguments, allow="allow") == f"{isolation} [1.0, 0.0]\n"
