"""Runs whose steps need several waves: engines, faults and replays leave the bits of an undisturbed run."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from integration.bits import differences
from integration.fault_runs import EXPERIMENT, begun, held
from integration.runs import MODEL, LiveRun
from towline.storage.ledger import read_scores, sealed_chunks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
NUM_STEPS = 12
WAVES = (
    f"steps={NUM_STEPS}",
    "trainer.checkpoint_every=2",
    "rollout.prompts_per_step=4",
    "rollout.max_waves=4",
    "rollout.chunk_prompts=2",
    'rewards=[{use="reward.py:rare",weight=1.0},{use="overlong",weight=0.0,cache_tokens=2}]',
)
ENGINES = ("rollout.0", "rollout.1")


@pytest.fixture(scope="module")
def one_engine(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """A run that nothing happened to."""
    run = LiveRun(tmp_path_factory.mktemp("waves"), *WAVES, experiment=EXPERIMENT)
    assert run.wait() == 0, run.text
    return run


def test_a_step_draws_as_many_waves_as_it_needs_and_no_more(one_engine: LiveRun):
    assert len(one_engine.rows) == NUM_STEPS
    assert {row["rollouts/waves"] for row in one_engine.rows} == {1, 2, 3, 4}
    assert any(0 < row["rollouts/useful"] < 4 for row in one_engine.rows)
    for row in one_engine.rows:
        paths = sealed_chunks(one_engine.folder / "rollouts", row["step"])
        assert {path.parent.name for path in paths} == {f"wave-{wave}" for wave in range(int(row["rollouts/waves"]))}
        assert row["rollouts/useful"] >= 4 or row["rollouts/waves"] == 4
        assert row["rollouts/surplus"] == max(0, row["rollouts/useful"] - 4)


def test_the_mean_reward_is_that_of_the_first_wave_whatever_is_trained_on(one_engine: LiveRun):
    for row in one_engine.rows:
        paths = sealed_chunks(one_engine.folder / "rollouts", row["step"])
        sheets = [read_scores(path) for path in paths if path.parent.name == "wave-0"]
        totals = [score.total for sheet in sheets for score in sheet.scores]
        assert row["reward/mean"] == pytest.approx(np.mean(totals))


def test_two_engines_a_killed_one_and_a_killed_trainer_leave_the_bits_of_an_undisturbed_run(
    one_engine: LiveRun, tmp_path: Path
):
    with begun(tmp_path, *WAVES, "local.engines=2") as run:
        with asked_for_a_further_wave(run):
            run.find("rollout.0").kill()
        run.wait_until(lambda: "! rollout.0: killed by SIGKILL" in run.text, "notice of the killed engine")
        with asked_for_a_further_wave(run):
            run.find("trainer.1").kill()
        assert run.wait() == 3
        assert "FAILED: trainer.1: killed by SIGKILL" in run.text
        run.resume()
        assert run.wait() == 0, run.text
        assert differences(one_engine.folder, run.folder) == []


def test_a_replay_draws_the_same_waves_and_has_the_same_losses(one_engine: LiveRun):
    done = subprocess.run(
        [sys.executable, "-m", "towline.launcher.cli", "replay", str(one_engine.folder), "--step", str(NUM_STEPS - 1)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"TOWLINE_ALLOW_LOGIN": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (one_engine.folder / "logs").glob("attempt-*/replay.jsonl")
    replayed = [json.loads(line) for line in path.read_text().splitlines()]
    assert replayed
    for again in replayed:
        live = one_engine.rows[again["step"]]
        for name in ("rollouts/waves", "rollouts/useful", "rollouts/surplus", "reward/mean", "tokens/loss"):
            assert again[name] == live[name]
        assert again["loss/policy"] == live["loss/policy"]


@contextmanager
def asked_for_a_further_wave(run: LiveRun) -> Iterator[None]:
    """Inside the block the trainer waits for a wave that it has asked for, and no engine has begun it."""
    store = run.store()
    for _ in range(10):
        with ExitStack() as engines:
            with held(run, "generating"):
                for name in ENGINES:
                    engines.enter_context(run.stopped(name))
                name = f"rollouts/waves/{store.get('training')}"
                before = store.get(name)
            # The scorer goes on, so that the trainer sees what the last wave has.
            deadline = time.monotonic() + 2.0
            while time.monotonic() < deadline:
                if store.get(name) != before:
                    yield
                    return
                time.sleep(0.02)
    raise AssertionError(f"no step asked for a further wave:\n{run.text}")
