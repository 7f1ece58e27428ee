"""SFT, DPO and reward models each learn, over three seeds, with the real engine; the table is printed with `-s`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from integration.runs import MODEL, PATIENCE_S, ROOT
from towline.rollout.evaluation.statistics import Interval, accuracy_interval, ratio_interval

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
SEEDS = (0, 1, 2)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learning")
    worker = Path(__file__).with_name("supervised_learning.py")
    done = subprocess.run(
        [sys.executable, worker, folder, *map(str, SEEDS)], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=PATIENCE_S, env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "learned.json").read_text())


def change(before, after) -> Interval:
    """Of the mean of the same examples."""
    difference = np.subtract(after[0], before[0]).tolist()
    return ratio_interval(difference, after[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_sft_raises_the_likelihood_of_held_out_solutions_and_teaches_their_form(learned, seed):
    one = learned["sft"][SEEDS.index(seed)]
    gained = change(one["before"], one["after"])
    print(f"sft seed {seed}: {gained} nats a token")
    assert gained.low > 1.0
    before, after = (accuracy_interval(int(sum(one[name][0])), 100) for name in ("form_before", "form_after"))
    print(f"sft seed {seed}: form {before} to {after}")
    assert before.high < 0.1
    assert after.low > 0.5


@pytest.mark.parametrize("seed", SEEDS)
def test_dpo_raises_the_held_out_win_rate(learned, seed):
    one = learned["dpo"][SEEDS.index(seed)]
    rate = accuracy_interval(round(sum(one["after"][0])), len(one["after"][0]))
    print(f"dpo seed {seed}: win rate {rate}")
    assert rate.low > 0.6


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reward_model_ranks_nine_of_ten_held_out_pairs_right(learned, seed):
    one = learned["reward_model"][SEEDS.index(seed)]
    before, after = (accuracy_interval(int(sum(one[when][0])), 200) for when in ("before", "after"))
    print(f"reward model seed {seed}: {before} to {after}")
    assert after.low > 0.9
    assert before.high < after.low
