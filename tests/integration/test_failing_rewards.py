"""Rewards that raise: a run trains on the rest and says how many failed, or ends and names three."""

import json
import re

import numpy as np
import pytest

from integration.fault_runs import EXPERIMENT
from integration.runs import MODEL, LiveRun
from towline.storage.ledger import read_scored_shard, sealed_chunks
from towline.storage.records import ScoreStatus

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]


def _options(function: str) -> tuple[str, ...]:
    return (f'rewards=[{{use = "reward.py:{function}", weight = 1.0, name = "graded"}}]', "run.stall_s=60")


def _shares(run: LiveRun, step: int) -> float:
    sheets = [read_scored_shard(path)[1] for path in sealed_chunks(run.folder / "rollouts", step)]
    return float(np.mean([score.status is not ScoreStatus.OK for sheet in sheets for score in sheet.scores]))


def test_a_run_trains_on_the_rest_where_few_rewards_fail(tmp_path):
    run = LiveRun(tmp_path, *_options("fails_on_one_in_twenty"), "steps=8", experiment=EXPERIMENT)
    try:
        assert run.wait() == 0, run.text
    finally:
        run.kill()
    rates = [row["reward/failed"] for row in run.rows]
    assert len(rates) == 8
    assert 0 < np.mean(rates) < 0.1
    assert rates == pytest.approx([_shares(run, step) for step in range(8)])
    assert all(np.isfinite(row["reward/mean"]) and np.isfinite(row["loss/policy"]) for row in run.rows)
    with_failures = next(row["step"] for row in run.rows if row["reward/failed"])
    line = next(line for line in run.text.splitlines() if line.startswith(f"step {with_failures + 1}/8 "))
    assert line.endswith(f"{100 * rates[with_failures]:.1f} % of the rewards failed")
    assert f"failures  {100 * np.mean(rates):.1f} % of the rewards: towline samples live --failed" in run.text
    assert re.search(r"scoring   graded: p50 \S+ ms, p99 \S+ ms, longest \S+ m?s", run.text)
    log = (run.folder / "logs" / "attempt-0" / "scorer.0.log").read_text()
    assert re.search(r"rollouts step-\d+/wave-0/chunk-\d+: \d+ completions in \S+ s, \d+ failed   graded p50 ", log)
    assert re.search(r"slowest graded: .*step-\d+/wave-0/chunk-\d+, row \d+, completion \d+: '", log)


def test_a_run_ends_with_a_checkpoint_where_many_rewards_fail_and_goes_on_once_they_are_mended(tmp_path):
    run = LiveRun(tmp_path, *_options("fails_on_every_other"), "steps=3", experiment=EXPERIMENT)
    try:
        assert run.wait() == 3, run.text
        assert re.search(r"FailedScoresError: step 0: \d+ of 32 completions could not be scored \(\d+ %\)", run.text)
        assert "scoring.max_failed allows 10 %" in run.text
        assert len(re.findall(r"row \d+, completion \d+ '.*': graded: ZeroDivisionError: drew 0\.", run.text)) == 3
        assert run.rows == []
        faults = [json.loads(path.read_text()) for path in (run.folder / "logs/attempt-0/faults").glob("*.json")]
        assert {fault["message"] for fault in faults} == {faults[0]["message"]}
        assert sorted(fault["process"] for fault in faults) == ["trainer.0", "trainer.1"]
        run.resume("scoring.max_failed=0.9")
        assert run.wait() == 0, run.text
        assert "step 0 is scored again: 2 of its chunks had completions without a score" in run.text
        assert [row["step"] for row in run.rows] == [0, 1, 2]
        assert all(row["reward/failed"] > 0.2 for row in run.rows)
    finally:
        run.kill()
