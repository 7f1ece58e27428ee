"""`towline status` of a run that was handed to Slurm: its word agrees with Slurm's."""

import time
from datetime import datetime
from types import SimpleNamespace

import pytest
from rich.console import Console

from fake_slurm import SILENT, FakeSlurm
from launcher_jobs import SINCE, pending, running
from towline.launcher import follow
from towline.launcher.cli import command
from towline.launcher.follow import RunWatch, follow_status, what_counts
from towline.launcher.job_lines import history_text
from towline.launcher.run_job import run_job
from towline.launcher.run_word import exit_code_of, run_word
from towline.launcher.status import asked_job, status_lines
from towline.storage.checkpoints import checkpoint_path
from towline.storage.metrics import append_jsonl
from towline.storage.run_directory import RunDirectory

NOW = datetime.fromisoformat(SINCE).timestamp() + 60


def status(run: RunDirectory) -> list[str]:
    return list(status_lines(run, now=NOW, job=asked_job(run)))


def begin_attempt(run: RunDirectory, number: int = 1, job: str = "12") -> None:
    run.logs(number).mkdir(parents=True)
    nodes = ["t0", "t1", "r0", "r1"]
    append_jsonl(run.attempts_file, {"number": number, "job": job, "submission": 0, "nodes": nodes, "began": NOW - 60})
    run.write_state(status="running", attempt=number, host="t0", pid=1, started=NOW - 60, ended=None)


def end_attempt(run: RunDirectory, number: int, outcome: str) -> None:
    append_jsonl(run.attempts_file, {"number": number, "ended": NOW, "outcome": outcome})


def never_started(run: RunDirectory) -> None:
    run.attempts_file.unlink()
    run.state.unlink()
    run.metrics.unlink()
    run.write_state(status="queued")


def test_a_job_in_the_queue(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    never_started(cluster_run)
    slurm.queue(*pending("12", reasons=("Priority", "Resources")))
    lines = status(cluster_run)
    assert lines[0].startswith("small-1  PENDING  job 12 waits since 03:04 ") or "Jan" in lines[0]
    assert lines[0].endswith("(1 min 00 s)")
    assert lines[1].startswith("why     Priority: jobs of higher priority come first. To do: ")
    assert lines[2].startswith("why     Resources: it is next")
    assert lines[3:6] == [
        "start   Slurm has no estimate yet",
        "trainer 2 nodes  PENDING  Priority",
        "rollout 2 nodes  PENDING  Resources",
    ]


def test_a_component_that_still_ends_is_not_asked_why_it_waits(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    before = "2026-01-02T02:00:00"
    slurm.queue(
        f"12+0|COMPLETING|None|{before}|1|t0|20:00|{before}|(null)",
        *pending("12", reasons=("BeginTime", "BeginTime"))[1:],
    )
    lines = status(cluster_run)
    assert lines[0].startswith("small-1  REQUEUED  job 12 waits since ")
    assert "(1 min 00 s)" in lines[0]
    assert [line for line in lines if line.startswith("why")] == [lines[1]]
    assert lines[3:5] == ["trainer COMPLETING", "rollout 2 nodes  PENDING  BeginTime"]


def test_slurms_estimate_of_the_start_is_told(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    never_started(cluster_run)
    soon = datetime.fromtimestamp(NOW + 3600).isoformat(timespec="seconds")
    slurm.queue(*pending("12", start=soon))
    lines = status(cluster_run)
    assert lines[2].startswith("start   ")
    assert lines[2].endswith(" at the earliest (Slurm's estimate)")


def test_a_running_job(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    begin_attempt(cluster_run)
    slurm.queue(*running("12"))
    lines = list(status_lines(cluster_run, now=time.time(), job=asked_job(cluster_run)))
    assert lines[0].startswith("small-1  RUNNING  attempt 1 of job 12  for ")
    assert lines[0].endswith(" (requeued once)")
    assert lines[1].startswith("trainer 2/2 nodes   rollout 2/2 nodes   time left 29 min ")
    assert lines[2].startswith("cost    0.10 node-hours")


def test_nodes_that_the_job_has_lost_are_named(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    begin_attempt(cluster_run)
    slurm.queue(*running("12", rollout="r0", num_rollout=1))
    lines = status(cluster_run)
    assert lines[1].startswith("trainer 2/2 nodes   rollout 1/2 nodes")
    assert lines[2] == "! lost nodes: r1"


def test_nodes_of_a_job_that_ends_are_not_lost(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    begin_attempt(cluster_run)
    slurm.queue(f"12+0|COMPLETING|None|{SINCE}|1|t0|20:00|{SINCE}|(null)")
    first, second, *_ = status(cluster_run)
    assert first.startswith("small-1  STOPPING  attempt 1 of job 12")
    assert second == "slurm   job 12 ends: its nodes are given back"


def test_requeues_and_work_done_again_are_counted(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    for number, outcome in ((1, "limit"), (2, "limit"), (3, "preempted")):
        begin_attempt(cluster_run, number)
        end_attempt(cluster_run, number, outcome)
    begin_attempt(cluster_run, 4)
    for step in range(3):
        append_jsonl(cluster_run.logs(4) / "superseded.jsonl", {"step": step, "seconds/step": 60.0})
    slurm.queue(*running("12"))
    job = run_job(cluster_run)
    assert job is not None
    assert history_text(cluster_run, job) == (
        " (requeued 4 times: 2 time-outs, 1 preemption; 3 min 00 s of work redone)"
    )


def test_a_job_that_waits_again_is_requeued_whatever_the_files_say(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.queue(*pending("12", reasons=("BeginTime", "BeginTime")))
    for said in ("running", "requeued", "done"):
        cluster_run.write_state(status=said)
        assert status(cluster_run)[0].startswith("small-1  REQUEUED  job 12 waits since ")


def test_a_run_that_says_it_runs_when_its_job_has_ended_is_lost_with_the_cause(
    cluster_run: RunDirectory, slurm: FakeSlurm
) -> None:
    begin_attempt(cluster_run)
    slurm.answers("sacct", "12+0|NODE_FAIL|1:0|t[0-1]", "12+1|NODE_FAIL|0:0|r[0-1]")
    lines = status(cluster_run)
    assert lines[0].startswith("small-1  LOST  attempt 1 of job 12")
    assert lines[1] == "slurm   job 12: 12+0 NODE_FAIL, exit code 1; 12+1 NODE_FAIL, exit code 0"
    assert any("kept: checkpoint 3 and every sealed shard" in line for line in lines)
    assert lines[-1].startswith("next: towline resume ")


@pytest.mark.parametrize(
    ("said", "ended", "word"),
    [
        ("queued", "CANCELLED", "CANCELLED"),
        ("queued", "FAILED", "FAILED"),
        ("stopping", "CANCELLED", "CANCELLED"),
        ("running", "CANCELLED", "LOST"),
        ("running", "TIMEOUT", "LOST"),
        ("requeued", "COMPLETED", "LOST"),
        ("interrupted", "CANCELLED", "CANCELLED"),
        ("done", "COMPLETED", "DONE"),
        ("failed", "FAILED", "FAILED"),
        ("stopped", "FAILED", "STOPPED"),
        ("budget", "FAILED", "BUDGET REACHED"),
    ],
)
def test_the_word_of_a_run_whose_job_has_ended(
    cluster_run: RunDirectory, slurm: FakeSlurm, said: str, ended: str, word: str
) -> None:
    cluster_run.write_state(status=said)
    slurm.answers("sacct", f"12+0|{ended}|0:0|t0")
    assert run_word(cluster_run, run_job(cluster_run)) == word


@pytest.mark.parametrize(("said", "word"), [("running", "RUNNING"), ("stopping", "STOPPING"), ("queued", "RUNNING"),
                                            ("requeued", "RUNNING"), ("done", "DONE")])  # fmt: skip
def test_the_word_of_a_run_whose_job_runs(cluster_run: RunDirectory, slurm: FakeSlurm, said: str, word: str) -> None:
    cluster_run.write_state(status=said)
    slurm.queue(*running("12"))
    assert run_word(cluster_run, run_job(cluster_run)) == word


def test_when_slurm_is_silent_the_files_are_shown_and_that_is_said(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    begin_attempt(cluster_run)
    slurm.is_silent()
    lines = status(cluster_run)
    assert lines[0].startswith("small-1  RUNNING  attempt 1 of job 12")
    assert lines[1].startswith("! Slurm does not answer, so this is what the files say: ")
    assert SILENT in lines[1]


def test_a_run_that_used_up_its_budget_says_so(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    begin_attempt(cluster_run)
    end_attempt(cluster_run, 1, "budget")
    cluster_run.write_state(status="stopped")
    assert status(cluster_run)[0].startswith("small-1  BUDGET REACHED")


def test_the_verb_takes_a_job_id(
    cluster_run: RunDirectory, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["status", "--root", str(cluster_run.root.parent), "12+1.batch"]) == 0
    assert capsys.readouterr().out.startswith("small-1  DONE  attempt 0 of job 12")


def test_exit_codes_are_those_of_the_runs_end(cluster_run: RunDirectory) -> None:
    words = ("DONE", "BUDGET REACHED", "STOPPED", "FAILED", "LOST", "CANCELLED", "RUNNING", "PENDING", "NOT STARTED")
    assert [exit_code_of(cluster_run, word) for word in words] == [0, 5, 3, 3, 3, 3, None, None, None]
    (checkpoint_path(cluster_run.checkpoints, 3) / "complete.json").unlink()
    assert [exit_code_of(cluster_run, word) for word in ("FAILED", "STOPPED")] == [1, 3]


def test_follow_prints_a_block_when_something_is_new_and_ends_with_the_run(
    cluster_run: RunDirectory, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(follow, "BLOCK_EVERY_S", 0.0)
    begin_attempt(cluster_run)
    slurm.queue(*running("12"))
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            cluster_run.write_state(status="stopped")
            slurm.queue()

    # Not time.sleep itself, with which subprocess waits for Slurm's commands.
    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=sleep, time=time.time, monotonic=time.monotonic))
    assert follow_status(cluster_run, Console(highlight=False)) == 3
    blocks = capsys.readouterr().out.split("\n\n")
    assert [block.split("  ")[1] for block in blocks] == ["RUNNING", "STOPPED"]


def test_slurm_is_asked_again_when_the_files_change_or_after_a_while(
    cluster_run: RunDirectory, slurm: FakeSlurm
) -> None:
    begin_attempt(cluster_run)
    slurm.queue(*running("12"))
    watch = RunWatch(cluster_run)
    assert [watch.look() for _ in range(5)] == ["RUNNING"] * 5
    assert len(slurm.calls("squeue")) == 1
    before = what_counts(watch)
    cluster_run.write_state(status="stopping")
    assert watch.look() == "STOPPING"
    assert len(slurm.calls("squeue")) == 2
    assert what_counts(watch) != before


def test_a_run_that_seems_lost_is_given_time_for_its_last_word(
    cluster_run: RunDirectory, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_attempt(cluster_run)
    slurm.answers("sacct", "12+0|COMPLETED|0:0|t0")
    watch = RunWatch(cluster_run)
    assert watch.exit_code() is None
    monkeypatch.setattr(follow, "LOST_AFTER_S", 0.0)
    assert watch.exit_code() == 3
