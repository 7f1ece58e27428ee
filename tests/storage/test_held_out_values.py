"""What held-out examples measured, version by version."""

from pathlib import Path

import numpy as np
import pytest

from towline.storage.held_out_values import keep_held_out, read_held_out
from towline.storage.run_directory import RunDirectory


def test_values_of_every_version_come_back(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    keep_held_out(run, 0, np.array([3.5, -1.0 / 3]), [4, 1])
    keep_held_out(run, 20, np.array([2.5, 0.0]), [4, 1])
    assert read_held_out(run, 0).tolist() == [[3.5, 4.0], [-1.0 / 3, 1.0]]
    assert read_held_out(run, 20).tolist() == [[2.5, 4.0], [0.0, 1.0]]
    assert sorted(path.name for path in run.held_out.iterdir()) == ["version-000000.npy", "version-000020.npy"]


def test_margins_of_pairs_stand_beside_their_verdicts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    keep_held_out(run, 4, np.array([1.0, 0.0]), [1, 1], np.array([0.25, -1.5]))
    assert read_held_out(run, 4).tolist() == [[1.0, 1.0, 0.25], [0.0, 1.0, -1.5]]


def test_a_version_that_is_measured_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for value in (1.0, 2.0):
        keep_held_out(run, 3, np.array([value, value]), [1, 1])
    assert read_held_out(run, 3).tolist() == [[2.0, 1.0], [2.0, 1.0]]


def test_a_value_without_its_size_is_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with pytest.raises(ValueError, match="same shape"):
        keep_held_out(run, 3, np.array([1.0, 2.0]), [1])
    assert list(run.held_out.iterdir()) == []
