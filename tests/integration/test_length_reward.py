"""A whole run in which the reward for length joins on the way: the log says so, a resume and a replay do the same."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from integration.bits import differences
from integration.fault_runs import EXPERIMENT
from integration.runs import MODEL, LiveRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
NUM_STEPS, JOINS = 8, 4
"""The script's reward keeps about one mean, so that two windows of two steps are enough."""
LENGTH = (
    f"steps={NUM_STEPS}",
    "trainer.checkpoint_every=3",
    'rewards=[{use="reward.py:length",weight=1.0},{use="length",weight=0.5,target_tokens=2,'
    'when={"reward.length"=1.0},converged={min_reward=1.0,window=2,tolerance=10.0}}]',
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    run = LiveRun(tmp_path_factory.mktemp("length"), *LENGTH, experiment=EXPERIMENT)
    assert run.wait() == 0, run.text
    return run


def log_lines(run: LiveRun) -> list[str]:
    text = "".join(path.read_text() for path in sorted(run.folder.glob("logs/attempt-*/trainer.*.log")))
    return [line for line in text.splitlines() if "the rest of the reward has converged" in line]


def test_it_joins_once_and_the_log_and_the_metrics_say_when(whole: LiveRun):
    assert [row["reward/length_on"] for row in whole.rows] == [0] * JOINS + [1] * (NUM_STEPS - JOINS)
    assert log_lines(whole) == [f"step {JOINS}: the rest of the reward has converged: length counts"]
    for row in whole.rows:
        assert -1 < row["reward/part/length"] < 0
        paid = row["reward/part/reward.length"] - row["reward/mean"]
        assert (paid > 0.01) == (row["step"] >= JOINS)


@pytest.mark.parametrize(
    "stopped_after",
    [pytest.param(JOINS - 1, marks=pytest.mark.matrix), JOINS, pytest.param(JOINS + 1, marks=pytest.mark.matrix)],
)
def test_a_run_resumed_around_the_step_in_which_it_joins_has_the_same_bits(
    whole: LiveRun, tmp_path: Path, stopped_after: int
):
    run = LiveRun(tmp_path, *LENGTH, experiment=EXPERIMENT)
    run.wait_until(lambda: len(run.rows) > stopped_after, "step")
    run.kill()
    run.resume()
    assert run.wait() == 0, run.text
    assert differences(whole.folder, run.folder) == []


def test_a_replay_has_the_same_losses(whole: LiveRun, tmp_path: Path):
    folder = tmp_path / "live"
    shutil.copytree(whole.folder, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000006")
    done = subprocess.run(
        [sys.executable, "-m", "towline.launcher.cli", "replay", str(folder), "--step", str(NUM_STEPS - 2)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"TOWLINE_ALLOW_LOGIN": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("logs/attempt-*/replay.jsonl")
    replayed = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["step"] for row in replayed} >= {JOINS - 1, JOINS}
    for row in replayed:
        live = whole.rows[row["step"]]
        assert (row["loss/policy"], row["reward/mean"]) == (live["loss/policy"], live["reward/mean"])
