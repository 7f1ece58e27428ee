"""DPO on pairs that the policy makes itself: which fields it has, and what is refused."""

import shutil
from pathlib import Path

import pytest

from towline.jobs.experiment import DpoExperiment, IteratedDpoExperiment
from towline.jobs.load_experiment import load_experiment, override_experiment, recorded_experiment
from towline.storage.errors import ConfigError

SHIPPED = Path(__file__).parents[2] / "jobs" / "experiments"


def load(*overrides: str) -> IteratedDpoExperiment:
    experiment = load_experiment(SHIPPED / "tiny-iterated-dpo.toml", overrides)
    assert isinstance(experiment, IteratedDpoExperiment)
    return experiment


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(*overrides)
    return str(refused.value)


def test_dpo_with_rollouts_makes_its_own_pairs_and_without_reads_them(tmp_path: Path) -> None:
    experiment = load()
    assert (experiment.num_engines, experiment.num_scorers) == (1, 1)
    assert recorded_experiment(experiment.model_dump_json()) == experiment
    assert isinstance(load_experiment(SHIPPED / "tiny-dpo.toml"), DpoExperiment)
    # Rewards without [rollout] are not taken for given pairs either.
    shutil.copytree(SHIPPED, tmp_path / "experiments")
    path = tmp_path / "experiments" / "tiny-iterated-dpo.toml"
    head, _, rest = path.read_text().partition("[rollout]")
    path.write_text(head + rest[rest.index("[[rewards]]") :])
    with pytest.raises(ConfigError, match="rollout is missing"):
        load_experiment(path)


def test_a_round_has_no_second_model_unless_the_start_is_the_reference() -> None:
    assert not load().trainer.has_reference_model
    start = load("trainer.reference=start", "policy.reference=offloaded")
    assert start.trainer.has_reference_model
    assert start.trainer.last_refresh(100) is None
    assert 'trainer.reference = "round" has none' in refusal("policy.reference=offloaded").replace("\n", " ")


def test_what_grpo_alone_has_is_no_field() -> None:
    assert "trainer.kl_beta is not a field" in refusal("trainer.kl_beta=0.1")


def test_a_group_holds_its_pairs_and_a_round_its_minibatches() -> None:
    assert load("trainer.pairs_per_prompt=4").trainer.pairs_per_prompt == 4
    assert "must be at most 4: a group of rollout.group_size = 8" in refusal("trainer.pairs_per_prompt=5")
    assert "must not exceed rollout.prompts_per_step" in refusal("trainer.minibatches=129")


def test_bits_that_cannot_be_the_same_are_refused() -> None:
    assert load("deterministic=true").deterministic
    assert "needs rollout.max_staleness = 0" in refusal("deterministic=true", "rollout.max_staleness=1")
    with pytest.raises(ConfigError, match="label_smoothing belongs to"):
        override_experiment(load(), ("trainer.loss=ipo", "trainer.label_smoothing=0.1"))
