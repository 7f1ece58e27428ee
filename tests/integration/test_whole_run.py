"""Whole runs with real parts: supervisor, control store, vLLM engine, scorer, DeepSpeed ranks under mpirun."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from integration.runs import MODEL, ROOT, LiveRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
ENDED_WITHIN_S = 30.0


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory):
    """A long run that was asked to end by SIGTERM after its third step."""
    run = LiveRun(tmp_path_factory.mktemp("stopped"), "steps=1000", "trainer.checkpoint_every=2")
    try:
        run.wait_until(lambda: len(run.rows) >= 3, "third step")
        run.signal(signal.SIGTERM)
        run.code = run.wait(60)
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


def test_a_whole_run_evaluates_before_and_after(tmp_path):
    run = LiveRun(tmp_path, "steps=2", "local.engines=2", "rollout.max_staleness=1")
    try:
        assert run.wait(300) == 0, run.text
        evaluations = [json.loads(line) for line in (run.folder / "evaluations.jsonl").read_text().splitlines()]
        assert [row["version"] for row in evaluations] == [0, 2]
        assert all(row["num_prompts"] == 400 and row["low"] < row["accuracy"] < row["high"] for row in evaluations)
        assert [row["step"] for row in run.rows] == [0, 1]
        assert (run.folder / "reward.png").stat().st_size > 5_000
        assert run.processes() == []
    finally:
        run.kill()


@pytest.mark.parametrize(
    ("module", "rank", "name"), [("trainer_role", 1, "trainer.1"), ("rollout_role", None, "rollout.0")]
)
def test_a_killed_process_ends_the_run_and_is_named(tmp_path, module, rank, name):
    run = LiveRun(tmp_path, "steps=1000")
    try:
        run.wait_until(lambda: run.rows, "first step")
        run.find(module, rank).send_signal(signal.SIGKILL)
        killed = time.monotonic()
        code = run.wait(60)
        assert time.monotonic() - killed < ENDED_WITHIN_S
        assert code == 1
        assert f"FAILED: {name}: killed by SIGKILL" in run.text
        assert f"{name}.log" in run.text
        assert run.processes() == []
        assert json.loads((run.folder / "state.json").read_text())["status"] == "failed"
    finally:
        run.kill()


def test_a_hung_process_ends_the_run_and_is_named(tmp_path):
    run = LiveRun(tmp_path, "steps=1000", "run.stall_s=15")
    try:
        run.wait_until(lambda: run.rows, "first step")
        run.find("scorer_role").send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        code = run.wait(90)
        assert time.monotonic() - stopped < 15 + ENDED_WITHIN_S
        assert code == 1
        assert "FAILED: scorer.0: no progress for" in run.text
        assert run.processes() == []
    finally:
        run.kill()


def test_a_dead_control_store_ends_the_run_and_is_named(tmp_path):
    run = LiveRun(tmp_path, "steps=1000")
    try:
        heartbeat = run.folder / "logs/attempt-0/rollout.0.log"
        run.wait_until(heartbeat.exists, "engine's log")
        _store_of(run).kill()
        killed = time.monotonic()
        assert run.wait(60) == 1
        assert time.monotonic() - killed < ENDED_WITHIN_S
        assert "FAILED: store" in run.text
        assert run.processes() == []
    finally:
        run.kill()


def _store_of(run: LiveRun):
    import psutil

    children = psutil.Process(run._popen.pid).children()
    return next(child for child in children if "towline.jobs.store_process" in child.cmdline())


def _towline(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "towline.launcher.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env=os.environ | {"TOWLINE_ALLOW_LOGIN": "1"},
    )
