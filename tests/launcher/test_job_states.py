"""States from what sacct and squeue print; both are small scripts here."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from towline.launcher.het_job import HetInfoWatcher, HetSlurmJob
from towline.launcher.job_states import (
    ComponentState,
    StatesUnknown,
    all_ended,
    exit_code,
    job_states,
    overall,
    read_states,
)

NO_ACCOUNTING = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
NO_SUCH_JOB = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
AWAY = "echo 'error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What sacct and squeue do from now on: shell lines, or rows between `|`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def set_answers(**commands: str) -> None:
        for name, body in commands.items():
            rows = body.replace("\n", "\\n")
            body = body if "echo" in body or "exit" in body else f"printf '{rows}'"
            (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
            (tmp_path / name).chmod(0o755)

    return set_answers


@pytest.fixture
def watcher() -> HetInfoWatcher:
    return HetInfoWatcher(delay_s=0)


def state_now(watcher: HetInfoWatcher) -> str:
    time.sleep(0.002)  # submitit ignores a second question within a millisecond
    return watcher.get_state("12", "force")


def test_components_are_found_under_the_leader(answers, watcher: HetInfoWatcher, monkeypatch, tmp_path: Path) -> None:
    # case G4-05
    monkeypatch.setattr(HetSlurmJob, "watcher", watcher)
    answers(
        sacct="12+0|RUNNING|0:0|n1\n12+0.batch|RUNNING|0:0|n1\n12+1|FAILED|1:0|n2\n",
        squeue="12+0|RUNNING||n1\n",
    )
    job = HetSlurmJob(tmp_path, "12", components=["trainer", "rollout"])
    assert job.state == "FAILED"
    assert job.component_states() == {"trainer": "RUNNING", "rollout": "FAILED"}
    assert not job.done()
    assert HetSlurmJob(tmp_path, "12+1", components=["rollout"]).done()


def test_steps_and_other_jobs_are_no_components() -> None:
    # case G4-06: an array, a pending part of one and a step are not the job
    rows = "12+0|RUNNING|0:0|n1\n12.batch|FAILED|1:0|n1\n12+1.0|CANCELLED by 7|0:9|n2\n12+1|PENDING||\n"
    others = "1|FAILED|1:0|n3\n120+1|FAILED|1:0|n3\n7_3|FAILED|1:0|n3\n7_[0-3%2]|PENDING||\n7_[0-1,3-4]|PENDING||\n"
    assert read_states(rows + others, ["12"]) == {
        "12": {0: ComponentState("RUNNING", "0:0", "n1"), 1: ComponentState("PENDING")}
    }


def test_accounting_is_enough(answers) -> None:
    answers(sacct="12+0|COMPLETED|0:0|n1\n12+1|COMPLETED|0:0|n[2-3]\n", squeue="echo asked >&2; exit 7")
    assert job_states(["12"])["12"] == {
        0: ComponentState("COMPLETED", "0:0", "n1"),
        1: ComponentState("COMPLETED", "0:0", "n[2-3]"),
    }


def test_squeue_is_asked_where_there_is_no_accounting(answers) -> None:
    answers(sacct=NO_ACCOUNTING, squeue="12+0|COMPLETED||n1\n12+1|TIMEOUT||n2\n7_[1-9,...]|PENDING||\n")
    assert {number: row.state for number, row in job_states(["12"])["12"].items()} == {0: "COMPLETED", 1: "TIMEOUT"}


def test_squeue_is_asked_for_what_accounting_does_not_have_yet(answers) -> None:
    answers(sacct="7|COMPLETED|0:0|n3\n", squeue="12+0|PENDING||\n12+1|PENDING||\n")
    states = job_states(["7", "12"])
    assert states["7"][0].state == "COMPLETED"
    assert overall([row.state for row in states["12"].values()]) == "PENDING"


def test_a_requeued_job_is_pending_before_accounting_knows(answers) -> None:
    answers(sacct="12+0|PREEMPTED|0:0|n1\n12+1|CANCELLED by 0|0:0|n2\n", squeue="12+0|PENDING||\n12+1|PENDING||\n")
    assert {row.state for row in job_states(["12"])["12"].values()} == {"PENDING"}


def test_an_ordinary_job_is_component_0(answers, watcher: HetInfoWatcher) -> None:
    answers(sacct="12|CANCELLED by 1000|0:15|n1\n12.batch|CANCELLED|0:15|n1\n", squeue=NO_SUCH_JOB)
    assert watcher.get_state("12") == watcher.get_state("12+0") == "CANCELLED"
    assert watcher.is_done("12")


def test_a_job_of_which_nobody_knows_is_not_waited_for(answers, watcher: HetInfoWatcher) -> None:
    answers(sacct=NO_ACCOUNTING, squeue=NO_SUCH_JOB)
    assert (state_now(watcher), watcher.is_done("12", "cache")) == ("PENDING", False)
    watcher.lag_s = 0
    watcher.clear()
    assert (state_now(watcher), watcher.is_done("12", "cache")) == ("GONE", True)


def test_a_running_job_that_is_forgotten_is_not_waited_for(answers, watcher: HetInfoWatcher) -> None:
    watcher.lag_s = 0
    answers(sacct=NO_ACCOUNTING, squeue="12+0|RUNNING||n1\n12+1|RUNNING||n2\n")
    assert state_now(watcher) == "RUNNING"
    answers(squeue=NO_SUCH_JOB)
    assert state_now(watcher) == "GONE"


def test_what_cannot_be_told_now_is_not_gone(answers, watcher: HetInfoWatcher) -> None:
    watcher.lag_s = 0
    answers(sacct="7|RUNNING|0:0|n3\n", squeue=AWAY)
    assert job_states(["7", "12"]).keys() == {"7"}
    assert (state_now(watcher), watcher.is_done("12", "cache")) == ("UNKNOWN", False)
    answers(squeue="12+0|PENDING||\n")
    assert state_now(watcher) == "PENDING"


def test_the_last_answer_stands_while_the_controller_is_away(answers, watcher: HetInfoWatcher) -> None:
    answers(sacct=NO_ACCOUNTING, squeue="12+0|RUNNING||n1\n12+1|RUNNING||n2\n")
    assert state_now(watcher) == "RUNNING"
    answers(squeue=AWAY)
    with pytest.raises(StatesUnknown, match="scontrol ping"):
        job_states(["12"])
    assert state_now(watcher) == "RUNNING"


def test_ended_jobs_are_not_asked_for_again(answers, watcher: HetInfoWatcher) -> None:
    answers(sacct="12+0|COMPLETED|0:0|n1\n12+1|COMPLETED|0:0|n2\n", squeue=NO_SUCH_JOB)
    assert watcher.is_done("12", "force")
    asked = watcher.num_calls
    assert watcher.is_done("12", "force")
    assert watcher.num_calls == asked


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["RUNNING", "FAILED"], "FAILED"),
        (["COMPLETED", "OUT_OF_MEMORY"], "OUT_OF_MEMORY"),
        (["TIMEOUT", "CANCELLED"], "FAILED"),
        (["CANCELLED by 0", "CANCELLED by 0"], "CANCELLED"),
        (["RUNNING", "PENDING"], "PENDING"),
        (["COMPLETED", "RUNNING"], "RUNNING"),
        (["COMPLETED", "COMPLETING"], "COMPLETING"),
        (["COMPLETED", "COMPLETED"], "COMPLETED"),
    ],
)
def test_one_word_for_several_components(states: list[str], expected: str) -> None:
    assert overall(states) == expected


def test_a_job_has_ended_when_all_components_have() -> None:
    assert all_ended(["FAILED", "COMPLETED"])
    assert not all_ended(["FAILED", "RUNNING"])


def test_the_controller_is_asked_for_an_exit_code(answers) -> None:
    answers(scontrol="echo 'JobId=13 HetJobId=12 JobState=FAILED ExitCode=0:9 RunTime=00:00:01'")
    assert exit_code("12+1") == "0:9"
    answers(scontrol=NO_SUCH_JOB)
    assert exit_code("12+1") == ""
