"""What is asked of Slurm about a job's nodes, and what it is told; its commands are small scripts here."""

from pathlib import Path

import pytest

from fake_slurm import FakeSlurm
from towline.jobs.slurm.allocation import (
    exclude_nodes,
    hosts_of,
    lost_nodes,
    nodes_that_failed,
    submit_successor,
    time_limit_end,
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm.install(tmp_path / "bin", monkeypatch)


def test_accounting_says_which_nodes_went_down_during_an_attempt(slurm: FakeSlurm) -> None:
    # case G4-31
    slurm.answers("sacctmgr", "n3|DOWN", "n2|DRAIN", "n7|DOWN*")
    assert nodes_that_failed(("n1", "n2", "n3"), since=0.0) == ("n3",)
    (call,) = slurm.calls("sacctmgr")
    assert "nodes=n1,n2,n3" in call


def test_without_accounting_the_nodes_that_are_down_now_failed(slurm: FakeSlurm) -> None:
    # case G4-31
    slurm.fails("sacctmgr", "Slurm accounting storage is disabled")
    slurm.answers("sinfo", "n1|allocated", "n2|draining", "n3|down*")
    assert nodes_that_failed(("n1", "n2", "n3", "n4"), since=0.0) == ("n3", "n4")


@pytest.mark.parametrize("state", ["down", "down*", "idle*", "fail", "failing", "not_responding", "unknown"])
def test_a_node_that_slurm_gave_up_is_lost(slurm: FakeSlurm, state: str) -> None:
    slurm.answers("sinfo", f"n3|{state}", "n1|mixed")
    assert lost_nodes(("n1", "n3")) == ("n3",)


def test_no_component_gets_a_node_that_failed_nor_one_that_its_profile_excludes(slurm: FakeSlurm) -> None:
    # case G4-31: ExcNodeList takes the place of what was there
    slurm.answers("squeue", "12|n[1-2]", "13|(null)", "14|n3,n9")
    exclude_nodes("12", ("n3",))
    assert slurm.calls("scontrol") == [
        "update JobId=12 ExcNodeList=n1,n2,n3",
        "update JobId=13 ExcNodeList=n3",
        "update JobId=14 ExcNodeList=n3,n9",
    ]
    (call,) = slurm.calls("squeue")
    assert "--job=12" in call


def test_a_successor_waits_for_the_job_and_inherits_nothing_of_it(
    slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case G4-10
    (slurm.folder / "sbatch").write_text('#!/bin/sh\necho "$*" >> "$0.calls"\nenv > "$0.environment"\necho 40\n')
    for name in ("SLURM_JOB_ID", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SBATCH_PARTITION", "PMIX_RANK"):
        monkeypatch.setenv(name, "inherited")
    assert submit_successor(Path("/runs/a/slurm/callable.sh"), "12") == "40"
    assert slurm.calls("sbatch") == ["--parsable --dependency=afterany:12 /runs/a/slurm/callable.sh"]
    assert "inherited" not in (slurm.folder / "sbatch.environment").read_text()


def test_the_first_limit_of_its_components_ends_a_job(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", "2026-01-02T03:04:05", "2026-01-02T03:04:00")
    first = time_limit_end("12")
    slurm.answers("squeue", "2026-01-02T03:04:00")
    assert first == time_limit_end("12")
    slurm.answers("squeue", "N/A")
    assert time_limit_end("12") is None


def test_nodes_of_a_job_are_those_of_all_its_components() -> None:
    # case G4-01
    lists = {"SLURM_JOB_NODELIST_HET_GROUP_0": "n[001-003,007]", "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu-a[1-2]"}
    assert hosts_of({"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST": "n[001-003,007]", **lists}) == (
        *("n001", "n002", "n003", "n007"),
        *("gpu-a1", "gpu-a2"),
    )
    assert hosts_of({"SLURM_JOB_NODELIST": "box[1,2]"}) == ("box1", "box2")
