"""Whole runs of SFT, DPO and reward models that are killed or stopped and go on: the bits of an undisturbed run.

Every step accumulates several micro-batches on both ranks.
"""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from integration.bits import differences
from integration.example_runs import STEPS_PER_EPOCH, write_experiment
from integration.runs import MODEL, LiveRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
STEPS, RANKS, BUDGET = 12, 2, 64
"""Of the experiments."""
END_OF_SECOND_EPOCH = 2 * STEPS_PER_EPOCH
MEASURES = {"sft": "nll", "dpo": "win_rate", "reward_model": "accuracy"}


@pytest.mark.parametrize("objective", ["sft", "dpo", pytest.param("reward_model", marks=pytest.mark.matrix)])
def test_a_killed_run_has_the_bits_of_an_undisturbed_one(objective: str, tmp_path: Path) -> None:
    """SFT is stopped too, by SIGTERM where an epoch ends: the epochs that are left are trained (G3-36)."""
    undisturbed = started(tmp_path / "undisturbed", objective)
    assert undisturbed.wait() == 0, undisturbed.text
    assert [row["step"] for row in undisturbed.rows] == list(range(STEPS))
    assert all(row["tokens/trained"] > 4 * RANKS * BUDGET for row in undisturbed.rows)
    judged = evaluations(undisturbed)
    assert [(row["version"], row["measure"]) for row in judged] == [
        (version, MEASURES[objective]) for version in (0, 4, 8, STEPS)
    ]
    run = started(tmp_path / "disturbed", objective)
    try:
        run.wait_until(lambda: len(run.rows) >= 4, "a step after the first checkpoint")
        run.find("trainer.1").kill()
        assert run.wait() == 3, run.text
        assert "FAILED: trainer.1: killed by SIGKILL" in run.text
        run.resume()
        if objective == "sft":
            stop_at_the_end_of_the_second_epoch(run)
            run.resume()
        assert run.wait() == 0, run.text
        first, *later = continued_at(run)
        # A busy machine notices the first checkpoint late.
        assert 3 <= first < END_OF_SECOND_EPOCH
        assert later == ([END_OF_SECOND_EPOCH] if objective == "sft" else [])
        assert differences(undisturbed.folder, run.folder, without=("ledger",)) == []
    finally:
        run.kill()


def started(root: Path, objective: str) -> LiveRun:
    root.mkdir()
    return LiveRun(root, experiment=write_experiment(root, objective))


def stop_at_the_end_of_the_second_epoch(run: LiveRun) -> None:
    """Ask for it within the epoch's last step, in which a rank is held until every process has heard."""
    run.wait_until(lambda: len(run.rows) >= 4 and run.state["status"] == "running", "the next attempt")
    trainer = run.find("trainer.1")
    run.wait_until(lambda: len(run.rows) >= END_OF_SECOND_EPOCH - 1, "the last step of the second epoch")
    trainer.send_signal(signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    trainer.send_signal(signal.SIGCONT)
    assert run.wait() == 3, run.text
    assert run.state["next_step"] == END_OF_SECOND_EPOCH


def continued_at(run: LiveRun) -> list[int]:
    """The checkpoints that attempts went on from."""
    return [int(step) for step in re.findall(r"going on from checkpoint (\d+)", run.text)]


def evaluations(run: LiveRun) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run.folder / "evaluations.jsonl").read_text().splitlines()]
