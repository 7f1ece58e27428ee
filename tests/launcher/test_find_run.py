import os
from pathlib import Path

import pytest

from towline.launcher.find_run import find_run
from towline.launcher.run import make_run
from towline.storage.errors import RunFolderError


@pytest.fixture
def two_runs(project) -> Path:
    for name, when in (("older", 1000), ("newer", 2000)):
        run = make_run(*project.read(f"run.name={name}"))
        os.utime(run.config, (when, when))
    return project.runs


def test_without_a_name_the_latest_run_is_meant(two_runs: Path) -> None:
    assert find_run(None, two_runs).root.name == "newer"


def test_a_replay_of_the_older_run_does_not_make_it_the_latest(two_runs: Path) -> None:
    (two_runs / "older" / "logs" / "attempt-1").mkdir(parents=True)
    assert find_run(None, two_runs).root.name == "newer"


def test_a_run_is_found_by_name_or_folder(two_runs: Path) -> None:
    assert find_run("older", two_runs).root == two_runs / "older"
    assert find_run(str(two_runs / "older"), Path("elsewhere")).root == two_runs / "older"


def test_an_unknown_name_is_answered_with_the_nearest(two_runs: Path) -> None:
    with pytest.raises(RunFolderError, match=r"olde is no run in .* Did you mean older\?"):
        find_run("olde", two_runs)
    with pytest.raises(RunFolderError, match="There: newer, older"):
        find_run("xyz", two_runs)


def test_no_runs_at_all(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"holds no run\. Name one, or its root with --root"):
        find_run(None, tmp_path / "runs")


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"is not a run folder: experiment\.json is missing"):
        find_run(str(tmp_path), tmp_path / "runs")
