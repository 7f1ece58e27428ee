"""One command trains a reward model and its watcher: two models of different pairs that judge much alike."""

from pathlib import Path

import pytest

from integration.runs import MODEL, ROOT, LiveRun
from towline.launcher.watcher import correlation
from towline.rollout.evaluation.statistics import accuracy_interval
from towline.storage.checkpoints import checkpoint_path, read_state
from towline.storage.held_out_values import read_held_out
from towline.storage.run_directory import RunDirectory

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
STEPS = 8
EXPERIMENT = ROOT / "jobs" / "experiments" / "tiny-reward-model.toml"
SMALL = (f"steps={STEPS}", "trainer.warmup_steps=1", "trainer.batch_size=32", "local.trainer_ranks=1")


def test_a_reward_model_and_its_watcher_differ_and_agree_better_than_chance(tmp_path: Path) -> None:
    live = LiveRun(tmp_path, "watcher=true", *SMALL, experiment=EXPERIMENT)
    try:
        assert live.wait() == 0, live.text
    finally:
        live.kill()
    runs = [RunDirectory.open(tmp_path / name) for name in ("live", "live-watcher")]
    kept = [checkpoint_path(run.checkpoints, STEPS) for run in runs]
    first, watcher = (read_state(run.checkpoints, STEPS) for run in runs)
    # A resume with the other's pairs, or order of them, would be refused.
    assert first.data != watcher.data
    assert first.seed != watcher.seed
    weights, watcher_weights = ((path / "hf" / "model.safetensors").read_bytes() for path in kept)
    assert weights != watcher_weights
    (hits, _, margins), (watcher_hits, _, watcher_margins) = (read_held_out(run, STEPS).T for run in runs)
    agreement = accuracy_interval(int((hits == watcher_hits).sum()), len(hits))
    print(f"agreement {agreement}, correlation of margins {correlation(margins, watcher_margins)}")
    assert agreement.low > 0.5
    assert correlation(margins, watcher_margins) > 0
    assert "\nsame verdict on " in live.text
