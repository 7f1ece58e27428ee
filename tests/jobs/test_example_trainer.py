"""Held-out examples are measured once a version, with an interval, and a value that is none is no miss."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from single_rank import single_rank
from towline.jobs.example_trainer import ExampleTrainer, HeldOutValues
from towline.rollout.evaluation.statistics import accuracy_interval
from towline.storage.errors import NumericsError
from towline.storage.held_out_values import read_held_out
from towline.storage.run_directory import read_jsonl


def trainer(run, values: list[float]) -> ExampleTrainer:
    role = SimpleNamespace(run=run, heartbeat=SimpleNamespace(beat=lambda phase: None))
    found = HeldOutValues(measure="win_rate", sums=np.array(values), sizes=[1] * len(values), more={"margin": 0.5})
    return ExampleTrainer(
        role=role, engine=None, objective=None, data_hash="", resume_step=None, every=2, evaluate=lambda: found
    )  # fmt: skip


def test_a_version_is_measured_once_with_the_interval_of_a_proportion(run):
    with single_rank():
        trainer(run, [1.0, 1.0, 0.0, 1.0])._evaluate(2)
        trainer(run, [0.0] * 4)._evaluate(2)
    (row,) = read_jsonl(run.evaluations)
    expected = accuracy_interval(3, 4)
    assert (row["estimate"], row["low"], row["high"]) == (expected.estimate, expected.low, expected.high)
    assert (row["version"], row["measure"], row["margin"], row["num_examples"]) == (2, "win_rate", 0.5, 4)
    assert read_held_out(run, 2).tolist() == [[1, 1], [1, 1], [0, 1], [1, 1]]


def test_margins_are_kept_with_the_verdicts(run):
    scored = trainer(run, [1.0, 0.0])
    found = dataclasses.replace(scored.evaluate(), margins=np.array([2.5, -0.5]))
    with single_rank():
        dataclasses.replace(scored, evaluate=lambda: found)._evaluate(2)
    assert read_held_out(run, 2).tolist() == [[1, 1, 2.5], [0, 1, -0.5]]


def test_a_value_that_is_no_number_ends_the_run_and_counts_as_nothing(run):
    with single_rank(), pytest.raises(NumericsError, match="version 2: win_rate of 1 of 3 held-out examples"):
        trainer(run, [1.0, float("nan"), 0.0])._evaluate(2)
    assert not run.evaluations.exists()
