"""Good, wrong and hostile answers through two workers, in a process of their own so that its memory can be read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("thousand")
    search = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("thousand_answers.py"), folder],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": search},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(folder.iterdir()) == []  # no answer was carried out
    return json.loads(done.stdout)


def test_none_is_lost_and_none_is_wrong(outcome: dict[str, Any]) -> None:
    assert outcome["num_scores"] == 1000
    assert outcome["totals"]["good"] == {"1.0": 500}
    assert outcome["totals"]["wrong"] == {"0.0": 300}
    assert sum(outcome["totals"]["hostile"].values()) == 200
    assert "1.0" not in outcome["totals"]["hostile"]


def test_no_answer_takes_longer_than_the_limit(outcome: dict[str, Any]) -> None:
    assert outcome["longest_s"] < outcome["limit_s"] + 0.5


def test_memory_is_bounded_and_no_process_is_left(outcome: dict[str, Any]) -> None:
    assert outcome["parent_mib"] < 300
    assert outcome["worker_mib"] < 1000
    assert outcome["left"] == []
