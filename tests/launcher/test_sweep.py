"""Several values of beta: a run for each, one table of the reference, and which of them are told apart."""

import numpy as np
import pytest

from towline.launcher.several_runs import runs_of
from towline.launcher.sweep import sweep_lines
from towline.storage.errors import ConfigError
from towline.storage.held_out_values import keep_held_out
from towline.storage.metrics import append_jsonl
from towline.storage.run_directory import RunDirectory, write_json
from towline.trainer.supervised_config import SweepConfig

EXPERIMENT = """\
objective = "dpo"
steps = 3

[policy]
model = "model"

[data]
train = "train.jsonl"

[trainer]
learning_rate = 1e-4
batch_size = 2

[evaluation.data]
train = "held_out.jsonl"

[sweep]
beta = [0.05, 0.1, 0.5]

[run]
root = "runs"
name = "pairs"
"""
WINS = {0.05: [1] * 60 + [0] * 40, 0.1: [1] * 90 + [0] * 10, 0.5: [1] * 89 + [0] * 11}


@pytest.fixture
def runs(project):
    project.file.write_text(EXPERIMENT)
    _, experiment = project.read()
    return runs_of(project.file, experiment)


def test_each_value_has_a_run_of_its_own_and_all_share_a_table(project, runs) -> None:
    assert [one.run.name for one in runs] == ["pairs-beta-0.05", "pairs-beta-0.1", "pairs-beta-0.5"]
    assert [one.trainer.beta for one in runs] == [0.05, 0.1, 0.5]
    assert {one.policy.reference_tables for one in runs} == {project.runs / "pairs-reference"}
    assert all(one.sweep is None for one in runs)


def test_the_table_names_the_best_and_who_is_not_told_apart_from_it(project, runs) -> None:
    for one in runs:
        run = RunDirectory.create(project.runs / one.run.name)
        write_json(run.config, one.model_dump(mode="json"))
        wins = WINS[one.trainer.beta]
        keep_held_out(run, 3, np.array(wins, dtype=float), [1] * 100)
        row = {"version": 3, "measure": "win_rate", "estimate": sum(wins) / 100, "low": 0.5, "high": 0.95}
        append_jsonl(run.evaluations, row | {"margin": 0.25, "num_examples": 100, "seconds": 1.0})
    head, lowest, best, highest = sweep_lines(runs)
    assert head.split()[:3] == ["beta", "win", "rate"]
    assert best.split() == ["0.1", "0.900", "(0.500", "to", "0.950)", "0.250", "best"]
    assert "-0.300 (-0.390 to -0.210)" in lowest
    assert "not told apart" not in lowest
    assert highest.endswith("not told apart")


def test_a_sweep_needs_held_out_pairs_and_different_values(project) -> None:
    project.file.write_text(EXPERIMENT.replace('[evaluation.data]\ntrain = "held_out.jsonl"\n', ""))
    with pytest.raises(ConfigError, match="sweep compares held-out win rates"):
        project.read()
    with pytest.raises(ValueError, match="names a value twice"):
        SweepConfig(beta=(0.1, 0.1))
