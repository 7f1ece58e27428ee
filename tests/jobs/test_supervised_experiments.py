"""Experiments that learn from given examples: their fields, and what is refused."""

from pathlib import Path

import pytest

from towline.jobs.experiment import DpoExperiment, RewardModelExperiment, SftExperiment
from towline.jobs.load_experiment import load_experiment, override_experiment, recorded_experiment
from towline.storage.errors import ConfigError

TEXT = """\
objective = "{objective}"
steps = 10

[policy]
model = "model"

[data]
train = "train.jsonl"

[trainer]
learning_rate = 1e-4
batch_size = 8

[evaluation]
every = 5

[evaluation.data]
train = "held_out.jsonl"
"""
KINDS = {"sft": SftExperiment, "dpo": DpoExperiment, "reward_model": RewardModelExperiment}


@pytest.fixture
def write(tmp_path: Path):
    def written(objective: str = "sft") -> Path:
        path = tmp_path / "small.toml"
        path.write_text(TEXT.format(objective=objective))
        return path

    return written


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_experiment(path, overrides)
    return str(refused.value)


@pytest.mark.parametrize("objective", KINDS)
def test_each_objective_has_a_class_of_its_own_and_no_engines(write, objective: str) -> None:
    experiment = load_experiment(write(objective))
    assert type(experiment) is KINDS[objective]
    assert (experiment.num_engines, experiment.num_scorers) == (0, 0)
    assert experiment.policy.folder == write(objective).parent / "model"
    assert recorded_experiment(experiment.model_dump_json()) == experiment


def test_an_unknown_objective_is_refused_with_those_there_are(write) -> None:
    assert refusal(write("ppo")) == (
        'small.toml:1: objective: expected one of "sft", "reward_model", "dpo", "grpo" (found \'ppo\').'
    )
    path = write()
    path.write_text(path.read_text().partition("\n")[2])
    assert "objective is missing; expected one of" in refusal(path)


def test_what_only_engines_need_is_no_field(write) -> None:
    assert refusal(write(), "rollout.group_size=8").startswith("small.toml:1: rollout is not a field.")
    assert "Did you mean" in refusal(write("dpo"), "trainer.bata=0.1")


def test_an_override_from_the_command_line_names_another_table_folder(write, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment(write("dpo"), ("policy.reference_tables=tables",))
    assert experiment.policy.reference_tables == tmp_path / "tables"
    assert override_experiment(experiment, ("steps=20",)).steps == 20


def test_a_watcher_has_the_other_half_and_pairs_to_be_compared_on(write) -> None:
    path = write("reward_model")
    assert load_experiment(path, ("watcher=true",)).watcher
    assert "leave data.half out, or watcher = true" in refusal(path, "watcher=true", "data.half=first")
    path.write_text(path.read_text().partition("[evaluation]")[0])
    assert not load_experiment(path).watcher
    assert "watcher compares two models on held-out pairs: add [evaluation.data]" in refusal(path, "watcher=true")
    assert "watcher is not a field" in refusal(write("dpo"), "watcher=true")


def test_a_warm_up_leaves_steps_for_the_schedule(write) -> None:
    said = refusal(write(), "trainer.warmup_steps=10")
    assert "trainer.warmup_steps (10) must be below steps (10)" in said
    assert load_experiment(write(), ("trainer.warmup_steps=10", "trainer.schedule=constant")).steps == 10


def test_fixed_bits_need_float32_and_one_thread(write) -> None:
    assert 'needs trainer.precision = "float32"' in refusal(write(), "deterministic=true")
    fixed = ("deterministic=true", "trainer.precision=float32")
    assert load_experiment(write(), fixed).deterministic
    assert "needs local.trainer_threads = 1, found 2" in refusal(write(), *fixed, "local.trainer_threads=2")


def test_smoothed_labels_are_of_the_sigmoid_alone(write) -> None:
    assert 'belongs to loss = "sigmoid"' in refusal(write("dpo"), "trainer.loss=ipo", "trainer.label_smoothing=0.1")
