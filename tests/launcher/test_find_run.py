import os
from pathlib import Path

import pytest

from towline.launcher.find_run import default_roots, find_run
from towline.launcher.run import make_run
from towline.storage.errors import RunFolderError
from towline.storage.metrics import append_jsonl
from towline.storage.run_directory import RunDirectory


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


@pytest.mark.parametrize("text", ["12", "12+1", "12_3", "12.batch", "12+0.3"])
def test_a_run_is_found_by_one_of_its_jobs(two_runs: Path, text: str) -> None:
    for job in ("11", "12"):
        append_jsonl(RunDirectory(two_runs / "older").submissions, {"job": job, "submission": 0, "submitted": 1.0})
    append_jsonl(RunDirectory(two_runs / "newer").submissions, {"job": "13", "submission": 0, "submitted": 2.0})
    assert find_run(text, two_runs).root.name == "older"


def test_a_job_id_that_was_given_out_again_means_the_later_run(two_runs: Path) -> None:
    for name, when in (("newer", 5.0), ("older", 7.0)):
        append_jsonl(RunDirectory(two_runs / name).submissions, {"job": "12", "submission": 0, "submitted": when})
    assert find_run("12", two_runs).root.name == "older"


def test_a_run_whose_name_is_a_number_is_meant_first(project, two_runs: Path) -> None:
    make_run(*project.read('run.name="12"'))
    append_jsonl(RunDirectory(two_runs / "older").submissions, {"job": "12", "submission": 0, "submitted": 1.0})
    assert find_run("12", two_runs).root.name == "12"


def test_an_unknown_job_is_named(two_runs: Path) -> None:
    with pytest.raises(RunFolderError, match=r"99 is neither a run nor a Slurm job of a run in "):
        find_run("99", two_runs)


def test_several_roots_are_one_choice(project, two_runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_run(*project.read("run.name=far", f"run.root={other}"))
    assert find_run(None, two_runs, other).root == other / "far"
    assert find_run("far", two_runs, other).root == other / "far"
    assert find_run("older", two_runs, other).root == two_runs / "older"


def test_the_clusters_folder_is_looked_at_when_a_cluster_is_set(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("TOWLINE_CLUSTER", raising=False)
    assert default_roots() == (Path("runs"),)
    profile = tmp_path / "big.toml"
    profile.write_text('name = "big"\n[folders]\nruns = "$SCRATCH/towline"\n')
    monkeypatch.setenv("TOWLINE_CLUSTER", str(profile))
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    assert default_roots() == (Path("runs"), tmp_path / "towline")
