"""Which job a run has, and what Slurm says of it."""

import os
from pathlib import Path

from fake_slurm import SILENT, FakeSlurm
from launcher_jobs import SCRIPT, pending, running
from towline.launcher.job_states import GONE
from towline.launcher.run_job import live_jobs, recorded_jobs, run_job
from towline.storage.metrics import append_jsonl
from towline.storage.run_directory import RunDirectory


def test_a_running_job_has_its_components_and_nodes(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.queue(*running("12"))
    job = run_job(cluster_run)
    assert job is not None
    assert (job.id, job.is_alive, job.is_waiting) == ("12", True, False)
    assert [(part.name, part.num_nodes, part.nodes) for part in job.components] == [
        ("trainer", 2, ("t0", "t1")),
        ("rollout", 2, ("r0", "r1")),
    ]
    assert job.lost(["t0", "t1", "r0", "r1", "r2"]) == ("r2",)


def test_jobs_of_other_runs_are_not_seen(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.queue(*running("13"), *pending("14", "/elsewhere/slurm/callable.sh"), "slurm_load: a message of the site")
    assert live_jobs(cluster_run) == []


def test_a_successor_that_nobody_noted_is_known_by_its_script(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    script = f"{cluster_run.slurm}/{SCRIPT}"
    slurm.queue(*pending("15", script), *running("12"))
    assert [job.id for job in live_jobs(cluster_run)] == ["12", "15"]
    job = run_job(cluster_run)
    assert job is not None
    assert job.id == "12"
    slurm.queue(*pending("15", script))
    job = run_job(cluster_run)
    assert job is not None
    assert (job.id, job.is_waiting) == ("15", True)


def test_the_script_is_known_from_a_relative_folder_too(
    cluster_run: RunDirectory, slurm: FakeSlurm, monkeypatch
) -> None:
    slurm.queue(*pending("15", f"{cluster_run.slurm}/{SCRIPT}"))
    monkeypatch.chdir(cluster_run.root.parent)
    assert [job.id for job in live_jobs(RunDirectory(Path(cluster_run.root.name)))] == ["15"]


def test_a_job_that_ended_says_how(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.answers("sacct", "12+0|NODE_FAIL|0:0|t[0-1]", "12+0.batch|CANCELLED|0:15|t0", "12+1|COMPLETED|0:0|r[0-1]")
    job = run_job(cluster_run)
    assert job is not None
    assert (job.is_alive, job.end) == (False, "NODE_FAIL")
    assert job.end_detail == "12+0 NODE_FAIL, exit code 0; 12+1 COMPLETED, exit code 0"


def test_an_exit_by_signal_is_named(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.answers("sacct", "12|OUT_OF_MEMORY|0:125|t0")
    job = run_job(cluster_run)
    assert job is not None
    assert job.end_detail == "OUT_OF_MEMORY, exit code 0, signal 125"


def test_a_job_that_slurm_has_forgotten_is_gone(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    job = run_job(cluster_run)
    assert job is not None
    assert (job.end, job.silence) == (GONE, "")


def test_a_job_that_a_cluster_without_accounting_has_forgotten_is_gone_too(
    cluster_run: RunDirectory, slurm: FakeSlurm
) -> None:
    slurm.fails("sacct", "Slurm accounting storage is disabled")
    squeue = slurm.folder / "squeue"
    squeue.write_text("#!/bin/sh\ncase $* in *--jobs*) echo 'slurm_load_jobs error: Invalid job id specified' >&2; "
                      "exit 1;; esac\n")  # fmt: skip
    job = run_job(cluster_run)
    assert job is not None
    assert (job.end, job.silence) == (GONE, "")


def test_when_slurm_does_not_answer_that_is_said(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.is_silent()
    job = run_job(cluster_run)
    assert job is not None
    assert (job.id, job.is_alive, job.end) == ("12", False, "")
    assert SILENT in job.silence


def test_a_job_noted_twice_is_one_job(cluster_run: RunDirectory) -> None:
    append_jsonl(cluster_run.submissions, {"job": "12", "submission": 0, "submitted": 0.0})
    assert recorded_jobs(cluster_run) == ["12"]


def test_a_run_that_was_only_prepared_has_no_job(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    os.unlink(cluster_run.submissions)
    assert run_job(cluster_run) is None
