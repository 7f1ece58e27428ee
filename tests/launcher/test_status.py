import os
import subprocess

import pytest

from towline.launcher.cli import command
from towline.launcher.status import sparkline, status_lines
from towline.storage.checkpoints import checkpoint_path
from towline.storage.run_directory import RunDirectory, RunLock


def test_status_of_a_finished_run(run: RunDirectory) -> None:
    complete = checkpoint_path(run.checkpoints, 3) / "complete.json"
    os.utime(complete, (180.0, 180.0))
    assert list(status_lines(run, now=200.0)) == [
        "small-1  DONE  attempt 0  took 1 min 30 s, ended 10 s ago",
        "step 3/3   policy v3   staleness 0   10.0 s/step",
        "reward 0.500 ▁▅█   kl 0.0200   mismatch 3e-04   length 5 (+67 %)",
        "trainer idle 40 %   reward failures 8.3 %: towline samples --failed   (last 3 steps)",
        "held-out accuracy at version 0: 0.000 (0.000 to 0.900) on 2 prompts (1.0 s)",
        "held-out accuracy at version 3: 0.500 (0.000 to 0.900) on 2 prompts (1.0 s)",
        "checkpoint 3 (20 s ago)",
    ]


def test_a_running_run_says_when_it_ends(run: RunDirectory) -> None:
    run.metrics.write_text(run.metrics.read_text().split("\n")[0] + "\n")
    run.write_state(status="running")
    with RunLock(run):
        lines = list(status_lines(run, now=200.0))
    assert lines[0] == "small-1  RUNNING  attempt 0  for 1 min 40 s"
    assert lines[1].startswith("step 1/3   policy v1   staleness 0   10.0 s/step   ends ~")
    assert lines[1].endswith("(in 20 s)")


def test_a_run_whose_supervisor_died_is_lost(run: RunDirectory) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    run.write_state(status="running", pid=gone.pid)
    text = "\n".join(status_lines(run, now=200.0))
    assert text.startswith("small-1  LOST")
    assert f"its supervisor (process {gone.pid} on {os.uname().nodename}) is gone" in text
    assert "kept: checkpoint 3 and every sealed shard" in text
    assert text.endswith("small-1")
    assert "next: towline resume" in text


def test_a_stopped_run_says_how_it_goes_on(run: RunDirectory) -> None:
    run.write_state(status="stopped")
    assert list(status_lines(run, now=200.0))[-1].startswith("next: towline resume ")


def test_a_running_run_that_nobody_holds_is_lost_even_if_its_number_lives_again(run: RunDirectory) -> None:
    run.write_state(status="running", pid=os.getpid())
    assert next(iter(status_lines(run, now=200.0))).startswith("small-1  LOST")


def test_a_run_on_another_host_is_taken_at_its_word(run: RunDirectory) -> None:
    run.write_state(status="running", host="elsewhere", pid=1)
    assert next(iter(status_lines(run, now=200.0))).startswith("small-1  RUNNING")


def test_a_failed_run_shows_its_fault(run: RunDirectory) -> None:
    run.write_state(status="failed", fault="small-1 FAILED: rollout.0: out of memory\n  log  x")
    assert list(status_lines(run, now=200.0))[-1] == "small-1 FAILED: rollout.0: out of memory\n  log  x"


def test_a_run_that_has_done_nothing_yet(run: RunDirectory) -> None:
    for path in (run.metrics, run.evaluations, run.state):
        path.unlink()
    checkpoint = checkpoint_path(run.checkpoints, 3)
    (checkpoint / "complete.json").unlink()
    assert list(status_lines(run, now=200.0)) == ["small-1  NOT STARTED  attempt -", "step 0/3", "no checkpoint"]


def test_the_verb_finds_the_latest_run(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["status", "--root", str(run.root.parent)]) == 0
    assert capsys.readouterr().out.startswith("small-1  DONE")


def test_sparkline() -> None:
    assert sparkline([]) == sparkline([None]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([0.0, None, 7.0]) == "▁█"
    assert sparkline([float(value) for value in range(100)]) == "▁▁▂▂▂▃▃▄▄▄▅▅▅▆▆▇▇▇██"
