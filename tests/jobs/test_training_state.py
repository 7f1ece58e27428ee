"""What a checkpoint says its reference is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from towline.jobs.experiment import ExperimentConfig
from towline.jobs.training_state import reference_identity
from towline.storage.checkpoints import model_identity


@pytest.fixture
def name(make_experiment: Callable[..., ExperimentConfig], tmp_path: Path) -> Callable[..., str]:
    """Of a step's reference, without that of the model folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")

    def make(step: int, home: str = "on_device", **trainer: Any) -> str:
        usual = {"learning_rate": 1e-4, "kl_beta": 0.1, "reference_every": 2}
        experiment = make_experiment(policy={"reference": home}, trainer=usual | trainer)
        full = reference_identity(experiment, step)
        assert full.startswith(model_identity(folder))
        return full.removeprefix(model_identity(folder))

    return make


def test_a_reference_is_named_by_the_step_of_its_last_refresh(name: Callable[..., str]) -> None:
    second, fourth = ", refreshed at step 2", ", refreshed at step 4"
    assert [name(step) for step in range(5)] == ["", "", second, second, fourth]


def test_homes_with_the_same_numbers_have_the_same_name(name: Callable[..., str]) -> None:
    assert name(3, "offloaded") == name(3)
    assert name(3, "int8") == name(3) + ", int8"
    assert name(1, "int8") == ", int8"


def test_without_a_kl_term_only_the_model_folder_counts(name: Callable[..., str]) -> None:
    assert name(4, "int8", kl_beta=0.0) == ""
