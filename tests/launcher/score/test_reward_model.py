"""A run that is scored again by a reward model, which reads the token ids of the ledger."""

import json
import shutil
from pathlib import Path

import pytest

from towline.launcher.cli import command
from towline.storage.ledger import read_scores, sealed_chunks
from towline.storage.run_directory import RunDirectory


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.toml"
    path.write_text('[[rewards]]\nuse = "reward_model"\nname = "liked"\nweight = 2.0\nmodel = "rm"\n')
    return path


def test_one_that_reads_other_token_ids_is_refused(run: RunDirectory, project, rewards: Path, capsys) -> None:
    (rewards.parent / "rm").mkdir()
    tokenizer = json.loads((project.model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["a"] = 99
    (rewards.parent / "rm" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert command(["score", str(run.root), "--rewards", str(rewards)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"rewards.toml: liked: {rewards.parent}/rm has another tokenizer than the policy")


@pytest.mark.slow
def test_a_run_gets_its_scores(run: RunDirectory, project, rewards: Path, capsys) -> None:
    """Prompt 3, 4, 5 and completion 7, 1 are the same everywhere in it."""
    import numpy as np

    from tiny_models import write_scorer
    from towline.rollout.reward_model import RewardModel

    folder = write_scorer(rewards.parent / "rm", vocab_size=39)
    shutil.copyfile(project.model / "tokenizer.json", folder / "tokenizer.json")
    assert command(["score", str(run.root), "--rewards", str(rewards), "--workers", "1"]) == 0
    assert "2.0 · liked" in capsys.readouterr().out
    wanted = RewardModel(folder).score([np.array([3, 4, 5, 7, 1])])[0].value
    (path,) = sealed_chunks(run.rollouts, 0)
    (again,) = path.parent.glob("chunk-000.scores-*.h5")
    sheet = read_scores(path, again.stem.removeprefix("chunk-000.scores-"))
    assert [score.parts["liked"] for score in sheet.scores] == pytest.approx([wanted] * 4, abs=1e-5)
    assert [score.total for score in sheet.scores] == pytest.approx([2 * wanted] * 4, abs=1e-5)
