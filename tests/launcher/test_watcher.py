"""A reward model and its watcher: disjoint halves, another head, and how far the two agree."""

import json

import numpy as np
import pytest

from towline.jobs.load_experiment import recorded_experiment
from towline.launcher.several_runs import runs_of
from towline.launcher.watcher import chance_agreement, correlation, watcher_lines
from towline.storage.examples import load_preferences
from towline.storage.held_out_values import keep_held_out
from towline.storage.metrics import append_jsonl
from towline.storage.run_directory import RunDirectory, write_json

EXPERIMENT = """\
objective = "reward_model"
seed = 7
steps = 3
watcher = true

[policy]
model = "model"

[data]
train = "train.jsonl"

[trainer]
learning_rate = 1e-4
batch_size = 2

[evaluation.data]
train = "held_out.jsonl"

[run]
root = "runs"
name = "pairs"
"""
MARGINS = [[1, 1, 1, 1, 1, 1, 1, 1, -1, -1], [1, -1, 1, 1, 1, 1, 1, 0, 1, 0]]
"""Of ten pairs: 8 are right, and 7 with two ties; the verdicts on pair 1 and the last three differ."""


@pytest.fixture
def runs(project):
    project.file.write_text(EXPERIMENT)
    return runs_of(project.file, project.read()[1])


def test_each_model_has_a_half_of_the_pairs_and_a_seed_of_its_own(runs) -> None:
    assert [one.run.name for one in runs] == ["pairs", "pairs-watcher"]
    assert [(one.data.half, one.data.half_seed, one.seed) for one in runs] == [("first", 7, 7), ("second", 7, 8)]
    first, second = (one.model_dump(exclude={"data": {"half"}, "run": {"name"}, "seed": True}) for one in runs)
    assert first == second
    assert not first["watcher"]


def test_the_two_learn_from_pairs_of_different_prompts_that_are_together_all(project, runs) -> None:
    rows = [{"prompt": f"p{number}", "chosen": "a", "rejected": "b"} for number in range(20)]
    (project.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = ([pair.row for pair in load_preferences(one.data).rows] for one in runs)
    assert sorted(first + second) == list(range(20))
    assert min(len(first), len(second)) > 0


def test_what_is_recorded_trains_on_its_half_again(runs) -> None:
    for one in runs:
        again = recorded_experiment(one.model_dump_json())
        assert again == one
        assert runs_of(None, again) == [again]


def test_the_table_tells_how_far_the_two_agree(project, runs) -> None:
    for number, one in enumerate(runs):
        run = RunDirectory.create(project.runs / one.run.name)
        write_json(run.config, one.model_dump(mode="json"))
        margins = np.array(MARGINS[number], dtype=float)
        keep_held_out(run, 3, (margins + 1) / 2, [1] * 10, margins)
        row = {"version": 3, "measure": "accuracy", "estimate": 0.8 - number / 10, "low": 0.5, "high": 0.95}
        append_jsonl(run.evaluations, row | {"margin": 0.25, "calibration_error": 0.125, "num_examples": 10})
    head, first, second, verdicts, margins = watcher_lines(runs)
    assert head.split() == ["run", "pair", "accuracy", "margin", "calibration", "error"]
    assert first.split() == ["pairs", "0.800", "(0.500", "to", "0.950)", "0.250", "0.125"]
    assert second.split() == ["pairs-watcher", "0.700", "(0.500", "to", "0.950)", "0.250", "0.125"]
    # 0.8 * 0.7 both right, 0.2 * 0.1 both wrong, 0 * 0.2 both tied.
    assert verdicts == "same verdict on 0.600 (0.313 to 0.832) of 10 held-out pairs (0.580 if they erred independently)"
    # (0.4 - 0.6 * 0.6) / sqrt((1 - 0.36) * (0.8 - 0.36))
    assert margins == "correlation of margins 0.075"


def test_agreement_by_chance_and_correlation_by_hand() -> None:
    always, half = np.ones(4), np.array([1.0, 0.0, 1.0, 0.0])
    assert chance_agreement(always, always) == 1.0
    assert chance_agreement(always, half) == chance_agreement(half, half) == 0.5
    assert chance_agreement(np.full(4, 0.5), always) == 0.0
    tied = np.array([1.0, 0.5, 0.5, 0.0])
    assert chance_agreement(tied, tied) == (1 + 4 + 1) / 16
    assert correlation(half, 1 - 2 * half) == pytest.approx(-1)
    # Deviations -1, 0, 1 and -1, 1, 0: 1 / sqrt(2 * 2).
    assert correlation(np.array([1.0, 2.0, 3.0]), np.array([0.0, 2.0, 1.0])) == pytest.approx(0.5)
    assert correlation(half, always) is None
