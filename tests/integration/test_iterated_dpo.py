"""Iterated DPO with real parts: it learns, is replayed, and a killed run has the bits of an undisturbed one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from integration.bits import differences
from integration.runs import MODEL, ROOT, LiveRun
from towline.rollout.evaluation.statistics import paired_difference
from towline.storage.ledger import read_scored_shard, sealed_chunks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
EXPERIMENT = ROOT / "jobs" / "experiments" / "tiny-iterated-dpo.toml"
ROUNDS = 8


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    return finished(tmp_path_factory.mktemp("undisturbed"))


def started(root: Path) -> LiveRun:
    return LiveRun(root, "deterministic=true", experiment=EXPERIMENT)


def finished(root: Path) -> LiveRun:
    run = started(root)
    assert run.wait() == 0, run.text
    return run


def test_held_out_accuracy_rises_over_the_rounds(undisturbed: LiveRun) -> None:
    before, after = (answers(undisturbed, version) for version in (0, ROUNDS))
    difference = paired_difference(before, after)
    print(f"held-out accuracy {sum(before) / len(before):.3f} to {sum(after) / len(after):.3f}, {difference}")
    assert difference.low > 0


def answers(run: LiveRun, version: int) -> list[bool]:
    """Whether each held-out prompt was answered rightly, in the order of the data."""
    shards = [read_scored_shard(path) for path in sealed_chunks(run.folder / "held_out", version)]
    return [score.total == 1.0 for _, sheet in shards for score in sheet.scores]


def test_every_round_is_of_the_present_policy_and_agrees_with_its_engine(undisturbed: LiveRun) -> None:
    assert [row["step"] for row in undisturbed.rows] == list(range(ROUNDS))
    for row in undisturbed.rows:
        assert row["staleness/max"] == 0
        assert row["mismatch/max_abs_logprob"] < 1e-4
        assert row["probe/verdict"] == 1.0
        assert 0 < row["preference/pairs"] <= 2 * 128
        # Of one right and one wrong answer, or of answers that differ in form: never of equal ones.
        assert 0.1 <= row["preference/reward_gap"] <= 1.1


@pytest.mark.matrix
def test_replay_gives_the_live_losses_again(undisturbed: LiveRun) -> None:
    command = [sys.executable, "-m", "towline.launcher.cli", "replay", str(undisturbed.folder), "--step", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (undisturbed.folder / "logs").glob("attempt-*/replay.jsonl")
    replayed = [json.loads(line) for line in path.read_text().splitlines()]
    # From the checkpoint before it.
    assert [row["step"] for row in replayed] == [4, 5]
    for again in replayed:
        live = undisturbed.rows[again["step"]]
        for name in ("loss/preference", "preference/margin", "loss/gradient_norm"):
            assert again[name] == pytest.approx(live[name], abs=1e-6)


def test_a_killed_run_has_the_bits_of_an_undisturbed_one(undisturbed: LiveRun, tmp_path: Path) -> None:
    run = started(tmp_path)
    try:
        run.wait_until(lambda: len(run.rows) >= 5, "a round after the first checkpoint")
        run.find("trainer.1").kill()
        assert run.wait() == 3, run.text
        assert "FAILED: trainer.1: killed by SIGKILL" in run.text
        run.resume()
        assert run.wait() == 0, run.text
        assert differences(undisturbed.folder, run.folder) == []
    finally:
        run.kill()
