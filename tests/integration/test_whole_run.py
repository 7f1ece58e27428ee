"""Whole runs with real parts: supervisor, control store, vLLM engine, scorer, DeepSpeed ranks under mpirun."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from integration.bits import differences
from integration.fault_runs import EXPERIMENT as FAULTS
from integration.runs import MODEL, ROOT, LiveRun
from towline.storage.ledger import read_shard, sealed_chunks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
ENDED_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A long run that was asked to end by SIGTERM after its third step."""
    run = LiveRun(tmp_path_factory.mktemp("stopped"), "steps=1000", "trainer.checkpoint_every=2")
    try:
        run.wait_until(lambda: len(run.rows) >= 3, "third step")
        run.process.send_signal(signal.SIGTERM)
        run.code = run.wait()
        yield run
    finally:
        run.kill()


def test_sigterm_ends_a_run_cleanly_with_a_checkpoint(stopped_run):
    assert stopped_run.code == 3, stopped_run.text
    state = json.loads((stopped_run.folder / "state.json").read_text())
    step = state["next_step"]
    assert (state["status"], len(stopped_run.rows)) == ("stopped", step)
    assert (stopped_run.folder / f"checkpoints/step-{step:06d}/complete.json").is_file()
    assert stopped_run.processes() == []


def test_every_step_agrees_with_its_engine(stopped_run):
    for row in stopped_run.rows:
        assert row["mismatch/max_abs_logprob"] < 1e-4
        assert 0 <= row["mismatch/k3"] < 1e-9
        assert row["probe/new"] < 1e-4
        assert row["probe/old"] > 20 * row["probe/new"]
        assert row["probe/verdict"] == 1.0


def test_the_first_step_is_on_policy(stopped_run):
    row = stopped_run.rows[0]
    assert row["loss/clipped_first"] == 0.0
    assert row["loss/kl"] == pytest.approx(0.0, abs=1e-9)
    assert row["staleness/max"] == 0


def test_replay_gives_the_live_losses_again(stopped_run):
    # Step 1 has no checkpoint at or before it, so this trains again from the model folder.
    done = _towline("replay", str(stopped_run.folder), "--step", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    replayed = [
        json.loads(line)
        for path in (stopped_run.folder / "logs").glob("attempt-*/replay.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert [row["step"] for row in replayed] == [0, 1]
    for again, live in zip(replayed, stopped_run.rows, strict=False):
        for name in ("loss/policy", "loss/kl", "loss/gradient_norm"):
            assert again[name] == pytest.approx(live[name], abs=1e-6)


def test_samples_and_status_read_the_run(stopped_run):
    samples = _towline("samples", str(stopped_run.folder), "--num", "2")
    assert samples.returncode == 0
    assert "\\boxed" in samples.stdout
    status = _towline("status", str(stopped_run.folder))
    assert status.returncode == 0
    assert "live" in status.stdout


def test_after_sigterm_a_run_goes_on_where_it_stopped(stopped_run):
    step = stopped_run.state["next_step"]
    stopped_run.resume(f"steps={step + 2}")
    assert stopped_run.wait() == 0, stopped_run.text
    assert [row["step"] for row in stopped_run.rows] == list(range(step + 2))
    assert stopped_run.state["status"] == "done"


def test_a_killed_trainer_and_a_killed_engine_leave_the_bits_of_an_undisturbed_run(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    options = ("steps=4", "deterministic=true", "trainer.checkpoint_every=2", "evaluation.every=2")
    undisturbed = LiveRun(tmp_path / "one", *options)
    assert undisturbed.wait() == 0, undisturbed.text
    evaluations = [json.loads(line) for line in (undisturbed.folder / "evaluations.jsonl").read_text().splitlines()]
    assert [row["version"] for row in evaluations] == [0, 2, 4]
    assert all(row["num_prompts"] == 400 and row["low"] < row["accuracy"] < row["high"] for row in evaluations)
    assert (undisturbed.folder / "reward.png").stat().st_size > 5_000
    run = LiveRun(tmp_path / "other", *options)
    try:
        run.wait_until(lambda: run.rows, "first step")
        store = run.store()
        run.wait_until(lambda: store.get("leases/rollout.0/0"), "engine that generates")
        run.find("rollout.0").kill()
        run.wait_until(lambda: len(run.rows) >= 3, "third step, with the engine's next life")
        assert "! rollout.0: killed by SIGKILL" in run.text
        run.find("trainer.1").kill()
        killed = time.monotonic()
        assert run.wait() == 3
        assert time.monotonic() - killed < ENDED_WITHIN_S
        assert "FAILED: trainer.1: killed by SIGKILL" in run.text
        run.resume()
        assert run.wait() == 0, run.text
        assert differences(undisturbed.folder, run.folder) == []
    finally:
        run.kill()


def test_a_loss_that_is_not_finite_ends_the_run_and_is_replayed(tmp_path):
    """A learning rate that throws the weights out in step 0 leaves step 1 without a loss."""
    run = LiveRun(tmp_path, "trainer.learning_rate=1e20", "run.stall_s=120", experiment=FAULTS)
    assert run.wait() == 1, run.text  # no checkpoint is kept
    (said,) = set(re.findall(r"NumericsError: (step 1: loss .*)", run.text))
    assert re.match(r"step 1: loss \S+, gradient norm (nan|inf); expected finite numbers", said)
    assert "towline replay --step 1" in said
    faults = [json.loads(path.read_text()) for path in (run.folder / "logs/attempt-0/faults").glob("*.json")]
    assert {fault["process"]: fault["message"] for fault in faults} == {"trainer.0": said, "trainer.1": said}
    assert [row["version"] for row in run.rows] == [1]
    published = [json.loads(line)["version"] for line in (run.folder / "lineage.jsonl").read_text().splitlines()]
    assert published == [0, 1]
    replayed = _towline("replay", str(run.folder), "--step", "1")
    assert replayed.returncode == 1
    assert f"NumericsError: {said}" in replayed.stdout + replayed.stderr


def test_an_engine_that_stands_still_is_left_behind_and_comes_back(tmp_path):
    """Its chunks are taken over, its weights are not waited for; what it seals too late is set aside."""
    options = (
        "steps=1000",
        "local.engines=2",
        "run.lease_s=5",
        "run.sync_timeout_s=8",
        "rollout.max_completion_tokens=40",
    )
    run = LiveRun(tmp_path, *options)
    try:
        run.wait_until(lambda: run.rows, "first step")
        store = run.store()
        for _ in range(200):
            run.wait_until(lambda: store.get("leases/rollout.1/0"), "engine 1 that generates")
            with run.stopped("rollout.1"):
                if store.get("leases/rollout.1/0"):
                    enough = len(run.rows) + 2
                    run.wait_until(partial(_has_rows, run, enough), "two more steps, without engine 1")
                    assert "! rollout.1 made no progress for" in run.text
                    break
        aside = run.folder / "aside" / "aside.jsonl"
        run.wait_until(aside.exists, "late shard of engine 1")
        assert "late duplicate" in aside.read_text()
        back = len(run.rows)
        run.wait_until(
            lambda: any(_engines_of(run, step) == {0, 1} for step in range(back, len(run.rows))), "its return"
        )
        assert run.find("rollout.1").environ()["TOWLINE_LIFE"] == "0"
    finally:
        run.kill()


def _has_rows(run: LiveRun, number: int) -> bool:
    return len(run.rows) >= number


def _engines_of(run: LiveRun, step: int) -> set[int]:
    return {read_shard(path).origin.engine for path in sealed_chunks(run.folder / "rollouts", step)}


def _towline(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "towline.launcher.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"TOWLINE_ALLOW_LOGIN": "1"},
    )
