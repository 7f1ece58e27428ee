"""Under a real mpirun, as 1 and as 4 ranks with one worker each."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from launches import launch_ranks, wait_for_all
from scoring_pools import HOSTILE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SIZES = (1, 4)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("group")
    tell = "\n\ndef sleep_and_tell(argument):\n    time.sleep(float(argument))\n    return os.getpid()\n"
    (folder / "hostile.py").write_text(HOSTILE + tell)
    worker = Path(__file__).with_name("scorer_group_worker.py")
    for size in SIZES:
        log = folder / f"{size}.log"
        wait_for_all({log: launch_ranks(worker, size, log, folder)}, limit_s=60)
    return folder


def _read(results: Path, name: str, size: int, rank: int = 0) -> Any:
    return json.loads((results / f"{name}-{size}.{rank}.json").read_text())


@pytest.mark.parametrize("size", SIZES)
def test_a_group_scores_as_one_pool_does(results: Path, size: int) -> None:
    mixed = _read(results, "mixed", size)
    assert mixed["group"] == mixed["alone"]
    assert mixed["num_timed"] == 354


def test_a_slow_item_holds_up_nobody_else(results: Path) -> None:
    slow, *others = _read(results, "balance", 4)
    served = Counter(others)
    assert len(served) == 4
    # They take 0.5 s together on three ranks; on a machine that does other things too several times that.
    assert served[slow] < 25 < min(count for pid, count in served.items() if pid != slow)


@pytest.mark.parametrize("size", SIZES)
def test_after_a_call_that_was_interrupted_no_stale_answer_comes(results: Path, size: int) -> None:
    assert _read(results, "interrupted", size) == [float(number) for number in range(12)]


@pytest.mark.parametrize("size", SIZES)
def test_what_fails_on_one_rank_is_an_error_on_all(results: Path, size: int) -> None:
    last = size - 1
    said = [_read(results, "failure", size, rank) for rank in range(size)]
    assert said.pop() == "ZeroDivisionError: on the last rank"
    elsewhere = f"RewardError: another rank ended the scoring: rank {last}: ZeroDivisionError: on the last rank"
    assert said == [elsewhere] * last
    assert all("no such reward here" in _read(results, "refusal", size, rank) for rank in range(size))


@pytest.mark.parametrize("size", SIZES)
def test_no_process_of_a_rank_is_left(results: Path, size: int) -> None:
    assert [_read(results, "left", size, rank) for rank in range(size)] == [[]] * size
