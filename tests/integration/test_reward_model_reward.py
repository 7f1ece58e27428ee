"""A whole run that is paid by a reward model, and watched by another: what is sealed are the scores of its tokens."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from integration.fault_runs import EXPERIMENT
from integration.runs import MODEL, LiveRun
from towline.rollout.reward_model import RewardModel
from towline.storage.ledger import read_scores, read_shard, sealed_chunks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
NUM_STEPS = 2


def write_scorer(folder: Path, seed: int) -> Path:
    """The policy with a head of random numbers."""
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MODEL / name, folder / name)
    return folder


def test_a_run_without_any_other_reward_trains_on_the_scores_of_a_reward_model(tmp_path: Path):
    folders = {"liked": write_scorer(tmp_path / "liked", 0), "watcher": write_scorer(tmp_path / "watcher", 1)}
    rewards = ",".join(
        f'{{use="reward_model",name="{name}",weight={weight},model="{folders[name]}"}}'
        for name, weight in (("liked", 0.5), ("watcher", 0.0))
    )
    run = LiveRun(tmp_path, f"steps={NUM_STEPS}", f"rewards=[{rewards}]", experiment=EXPERIMENT)
    assert run.wait() == 0, run.text
    models = {name: RewardModel(folder) for name, folder in folders.items()}
    for step, row in enumerate(run.rows):
        found: dict[str, list[float]] = {name: [] for name in folders}
        for path in sealed_chunks(run.folder / "rollouts", step):
            sheet = read_scores(path)
            assert sheet.weights == {"liked": 0.5, "watcher": 0.0}
            texts = [
                np.concatenate([group.prompt_token_ids, completion.token_ids])
                for group in read_shard(path).groups
                for completion in group.completions
            ]
            for name, model in models.items():
                values = [score.parts[name] for score in sheet.scores]
                wanted = [verdict.value for verdict in model.score(texts)]
                np.testing.assert_allclose(values, np.array(wanted, float), rtol=1e-4, atol=1e-4)
                found[name] += values
            assert [score.total for score in sheet.scores] == pytest.approx(
                [0.5 * score.parts["liked"] for score in sheet.scores]
            )
        for name, values in found.items():
            assert row[f"reward/part/{name}"] == pytest.approx(np.mean(values), abs=1e-5)
            assert row[f"reward/spread/{name}"] == pytest.approx(np.std(values), abs=1e-5)
        assert row["reward/mean"] == pytest.approx(0.5 * row["reward/part/liked"], abs=1e-6)
        assert row["reward/failed"] == 0
        assert row["loss/gradient_norm"] > 0
        assert row["tripwire/narrowing_scores"] == row["tripwire/dissent"] == 0
    assert len(run.rows) == NUM_STEPS
