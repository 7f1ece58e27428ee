from pathlib import Path

import pytest

from towline.jobs.experiment import RolloutExperiment
from towline.jobs.load_experiment import load_experiment
from towline.launcher.reward_source import reward_problems
from towline.rollout.rewards.formula import formula

EXPERIMENTS = sorted((Path(__file__).resolve().parents[2] / "jobs/experiments").rglob("*.toml"))


def test_experiments_are_shipped() -> None:
    assert EXPERIMENTS


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_a_shipped_experiment_loads(path: Path) -> None:
    experiment = load_experiment(path)
    if isinstance(experiment, RolloutExperiment):
        assert not any(reward_problems(experiment.rewards))
    for data in (experiment.data, experiment.evaluation.data if experiment.evaluation else experiment.data):
        assert data.template is None or data.template.is_file()


def test_a_right_answer_and_a_tenth_for_its_form_is_shipped() -> None:
    experiments = {path.stem: load_experiment(path) for path in EXPERIMENTS}
    lines = {name: formula(one.rewards) for name, one in experiments.items() if isinstance(one, RolloutExperiment)}
    assert lines["tiny-grpo"] == lines["last-number"] == "1.0 · math_answer + 0.1 · format"
    assert lines["tiny-code"] == "1.0 · code_tests"
