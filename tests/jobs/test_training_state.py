"""What a checkpoint says its reference and its adapters are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from single_rank import single_rank
from towline.jobs.experiment import ExperimentConfig
from towline.jobs.training_state import reference_identity, training_state
from towline.jobs.work import training_work
from towline.storage.checkpoints import differences, model_identity
from towline.storage.run_directory import RunDirectory


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


def test_a_checkpoint_names_its_adapters_and_another_scale_of_them_is_another_policy(
    make_experiment: Callable[..., ExperimentConfig], run: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    with single_rank():
        whole, adapted, scaled = (
            training_state(experiment, training_work(experiment, run).data_hash, step=2)
            for settings in ({}, {"lora": {"rank": 8}}, {"lora": {"rank": 8, "alpha": 8}})
            for experiment in [make_experiment(trainer={"learning_rate": 1e-4} | settings)]
        )
    assert differences(adapted, adapted) == []
    for other in (whole, scaled):
        (text,) = differences(adapted, other)
        assert text.startswith('adapters: the checkpoint has \'{"rank":8,"alpha":32,')
