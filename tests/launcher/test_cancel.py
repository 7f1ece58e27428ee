import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from fake_slurm import FakeSlurm
from launcher_jobs import SCRIPT, pending, running
from towline.launcher.cli import command
from towline.storage.metrics import append_jsonl
from towline.storage.run_directory import RunDirectory

SUPERVISOR = """
import fcntl, signal, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
received = []
signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
print("ready", flush=True)
while len(received) < int(sys.argv[2]):
    time.sleep(0.05)
"""


def cancel(run: RunDirectory, *arguments: str) -> int:
    return command(["cancel", str(run.root), *arguments])


def is_running(run: RunDirectory) -> None:
    append_jsonl(run.attempts_file, {"number": 1, "job": "12", "submission": 0, "nodes": ["t0"], "began": 1.0})
    run.write_state(status="running", attempt=1)


def test_a_waiting_job_is_taken_out_of_the_queue(
    cluster_run: RunDirectory, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.queue(*pending("12"))
    assert cancel(cluster_run) == 0
    assert slurm.calls("scancel") == ["12"]
    assert capsys.readouterr().out.startswith("job 12 is cancelled; it was waiting\n")


def test_a_running_job_is_asked_to_stop_with_a_checkpoint(
    cluster_run: RunDirectory, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    is_running(cluster_run)
    slurm.queue(*running("12"))
    assert cancel(cluster_run) == 0
    assert slurm.calls("scancel") == ["--batch --signal=INT 12"]
    said = capsys.readouterr().out
    assert said.startswith("job 12 is asked to stop: it finishes its step, writes a checkpoint and ends")
    assert "towline resume" in said


def test_now_ends_it_at_once(cluster_run: RunDirectory, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    is_running(cluster_run)
    slurm.queue(*running("12"))
    assert cancel(cluster_run, "--now") == 0
    assert slurm.calls("scancel") == ["12"]
    assert "kept: checkpoint 3 and every sealed shard" in capsys.readouterr().out


def test_a_job_whose_supervisor_does_not_listen_yet_is_just_ended(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    slurm.queue(*running("12"))
    assert cancel(cluster_run) == 0
    assert slurm.calls("scancel") == ["12"]


def test_a_successor_is_cancelled_before_the_job_it_waits_for(cluster_run: RunDirectory, slurm: FakeSlurm) -> None:
    is_running(cluster_run)
    slurm.queue(*running("12"), *pending("15", f"{cluster_run.slurm}/{SCRIPT}", reasons=("Dependency",) * 2))
    assert cancel(cluster_run) == 0
    assert slurm.calls("scancel") == ["15", "--batch --signal=INT 12"]


def test_a_run_whose_jobs_have_ended_is_not_active(
    cluster_run: RunDirectory, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cancel(cluster_run) == 2
    assert capsys.readouterr().err == (
        "small-1 is not active: no job of it waits or runs; it is DONE. Nothing was cancelled.\n"
    )
    assert slurm.calls("scancel") == []


def test_a_silent_slurm_is_not_taken_for_an_ended_run(
    cluster_run: RunDirectory, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.is_silent()
    assert cancel(cluster_run) == 1
    assert "scontrol ping" in capsys.readouterr().err


@pytest.fixture
def supervisor(run: RunDirectory, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """Holds the run's lock until it was interrupted as often as the test says."""
    command = [sys.executable, "-c", SUPERVISOR, str(run.lock), str(request.param)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        run.write_state(status="running", pid=process.pid, host=socket.gethostname())
        yield process
        process.kill()


@pytest.mark.parametrize(("supervisor", "arguments"), [(1, ()), (3, ("--now",))], indirect=["supervisor"])
def test_a_run_of_this_machine_is_interrupted(
    run: RunDirectory, supervisor: subprocess.Popen[str], arguments: tuple[str, ...]
) -> None:
    assert cancel(run, *arguments) == 0
    assert supervisor.wait(10) == 0


@pytest.mark.parametrize("supervisor", [2], indirect=True)
def test_one_interrupt_is_all_that_an_orderly_stop_sends(run: RunDirectory, supervisor: subprocess.Popen[str]) -> None:
    assert cancel(run) == 0
    time.sleep(0.3)
    assert supervisor.poll() is None


def test_a_run_that_is_done_is_not_active(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert cancel(run) == 2
    assert capsys.readouterr().err == "small-1 is not active: it is DONE. Nothing was cancelled.\n"


def test_a_number_that_is_another_process_now_is_left_alone(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(number))
    run.write_state(status="running", pid=os.getpid(), host=socket.gethostname())
    assert cancel(run) == 2
    assert "its supervisor" in capsys.readouterr().err
    assert signal.SIGINT not in sent


def test_a_run_on_another_host_says_where(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.write_state(status="running", host="elsewhere", pid=1)
    assert cancel(run) == 2
    assert f"small-1 runs on elsewhere, and this is {socket.gethostname()}" in capsys.readouterr().err
