"""Whose fault it was: a rank killed under its launcher, a process killed by itself, or an error written down."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from towline.jobs import first_fault
from towline.jobs.first_fault import Fault, killed_fault, recorded_faults
from towline.storage.run_directory import RunDirectory, write_json

NO_LOG = Path("/nonexistent")
PRTERUN = """\
some output of rank 0
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 27309 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def what(run: RunDirectory, code: int) -> str | None:
    fault = killed_fault(run, 0, "rollout.1", code, NO_LOG)
    return None if fault is None else fault.what


def record(run: RunDirectory, process: str, when: float, error: str, message: str, life: int = 0) -> None:
    fault = {"process": process, "life": life, "when": when, "error": error, "message": message}
    fault |= {"traceback": f"Traceback of {process}", "log": f"/logs/{process}.log:12"}
    write_json(run.faults(0) / f"{process}.{life}.json", fault)


def test_a_killed_rank_is_named_by_its_launcher(run: RunDirectory, tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text(PRTERUN)
    assert killed_fault(run, 2, "trainer", 137, log) == Fault(
        process="trainer.1",
        what="killed by SIGKILL (out of memory, or kill -9) (pid 27309 on vm)",
        log=str(run.log(2, "trainer.1")),
    )


SRUN = """\
srun: error: gpu-03: task 2: Killed
srun: launch/slurm: _step_signal: Terminating StepId=12.3
srun: error: gpu-01: tasks 0-1: Terminated
srun: Force Terminated StepId=12.3
"""


def test_the_first_task_that_srun_names_counts(run: RunDirectory, tmp_path: Path) -> None:
    log = tmp_path / "trainer.launch.log"
    log.write_text("output of a rank\n" + SRUN)
    assert killed_fault(run, 2, "trainer", 143, log) == Fault(
        process="trainer.2",
        what="killed by SIGKILL (out of memory, or kill -9) (on gpu-03)",
        log=str(run.log(2, "trainer.2")),
    )


def test_a_task_that_ended_by_itself_was_not_killed_by_the_signal_that_ends_the_others(
    run: RunDirectory, tmp_path: Path
) -> None:
    log = tmp_path / "trainer.launch.log"
    log.write_text(SRUN.replace("Killed", "Exited with exit code 1"))
    assert killed_fault(run, 2, "trainer", 143, log) is None


def test_of_an_engine_the_latest_life_counts(run: RunDirectory, tmp_path: Path) -> None:
    log = tmp_path / "rollout.1.launch.log"
    log.write_text(
        "srun: error: g1: task 0: Out Of Memory\nsrun: error: g1: task 0: Segmentation fault (core dumped)\n"
    )
    fault = killed_fault(run, 0, "rollout.1", 139, log)
    assert fault is not None
    assert (fault.process, fault.what) == ("rollout.1", "killed by SIGSEGV (on g1)")


def test_the_first_rank_that_the_launcher_names_counts(run: RunDirectory, tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_bytes(
        b"\xff not text\n"
        b"mpirun noticed that process rank 3 with PID 50 on node gpu-07 exited on signal 11 (Segmentation fault).\n"
        b"mpirun noticed that process rank 0 with PID 47 on node gpu-01 exited on signal 15 (Terminated).\n"
    )
    fault = killed_fault(run, 0, "trainer", 139, log)
    assert fault is not None
    assert (fault.process, fault.what) == ("trainer.3", "killed by SIGSEGV (pid 50 on gpu-07)")


def test_a_process_of_its_own_is_named_by_its_signal(run: RunDirectory) -> None:
    killed = "killed by SIGKILL (out of memory, or kill -9)"
    assert what(run, -9) == what(run, 137) == killed
    assert what(run, -11) == what(run, 139) == "killed by SIGSEGV"
    assert what(run, -6) == what(run, 134) == "killed by SIGABRT"
    assert what(run, -40) == "killed by signal 40"


def test_the_code_of_a_process_that_was_really_killed_is_understood(run: RunDirectory) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGKILL)
    assert what(run, process.returncode) == "killed by SIGKILL (out of memory, or kill -9)"


def test_a_process_that_died_on_a_full_disk_is_told_with_what_is_free(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save ends the process with SIGABRT when it cannot finish its file, and there is no room to say why."""
    monkeypatch.setattr(first_fault.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    assert what(run, -signal.SIGABRT) == f"killed by SIGABRT; no more than 4096 bytes are free in {run.root}"


def test_a_file_system_that_does_not_answer_hides_no_fault(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(path: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(first_fault.shutil, "disk_usage", stale)
    assert what(run, -signal.SIGABRT) == "killed by SIGABRT"


@pytest.mark.parametrize("earlier_life", ["", "srun: error: g1: task 0: Killed\n"])
def test_a_step_that_slurm_did_not_start_was_not_killed(run: RunDirectory, tmp_path: Path, earlier_life: str) -> None:
    log = tmp_path / "rollout.1.launch.log"
    log.write_text(
        f"{earlier_life}srun: error: Task launch for StepId=10.3 failed on node g1: Job credential expired\n"
        "srun: error: Application launch failed: Job credential expired\nsrun: Job step aborted\n"
    )
    assert killed_fault(run, 0, "rollout.1", 167, log) == Fault(
        process="rollout.1", what="Slurm did not start it: Job credential expired", log=str(log)
    )


@pytest.mark.parametrize("code", [0, 1, 2, 3, 127, 128, 193, 254, 255])
def test_a_program_s_own_code_is_no_signal(run: RunDirectory, code: int) -> None:
    assert what(run, code) is None


def test_a_launcher_that_names_no_rank_is_judged_by_its_code(run: RunDirectory, tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_text("prterun detected that one or more processes exited with non-zero status\n  Exit code:    3\n")
    assert killed_fault(run, 0, "trainer", 3, log) is None
    assert killed_fault(run, 0, "trainer", -15, log) == Fault(
        process="trainer", what="killed by SIGTERM", log=str(run.log(0, "trainer"))
    )


def test_recorded_faults_come_in_the_order_of_time(run: RunDirectory) -> None:
    record(run, "trainer.0", 12.5, "DistBackendError", "peer closed")
    record(run, "rollout.1", 12.25, "OutOfMemoryError", "CUDA out of memory")
    record(run, "trainer.1", 100.0, "StoreError", "gone")
    assert [fault.process for fault in recorded_faults(run, 0)] == ["rollout.1", "trainer.0", "trainer.1"]
    assert recorded_faults(run, 0)[0] == Fault(
        process="rollout.1",
        what="OutOfMemoryError: CUDA out of memory",
        log="/logs/rollout.1.log:12",
        traceback="Traceback of rollout.1",
    )


def test_faults_of_two_lives_of_a_process_are_both_kept(run: RunDirectory) -> None:
    record(run, "rollout.0", 2.0, "StoreError", "gone", life=1)
    record(run, "rollout.0", 1.0, "MemoryError", "full")
    found = [(fault.life, fault.what) for fault in recorded_faults(run, 0)]
    assert found == [(0, "MemoryError: full"), (1, "StoreError: gone")]


def test_what_happened_is_told_in_one_line(run: RunDirectory) -> None:
    record(run, "a", 1.0, "ConfigError", "\n  two problems:\nthe first\r\nthe second")
    record(run, "b", 2.0, "KeyboardInterrupt", "")
    assert [fault.what for fault in recorded_faults(run, 0)] == ["ConfigError: two problems:", "KeyboardInterrupt"]


def test_faults_of_another_attempt_and_half_written_ones_are_not_told(run: RunDirectory) -> None:
    record(run, "a", 1.0, "StoreError", "gone")
    (run.faults(0) / ".b.json.12.0a1b2c3d.tmp").write_text('{"process": "b')
    assert [fault.process for fault in recorded_faults(run, 0)] == ["a"]
    assert recorded_faults(run, 1) == []
    assert json.loads((run.faults(0) / "a.0.json").read_text())["when"] == 1.0
