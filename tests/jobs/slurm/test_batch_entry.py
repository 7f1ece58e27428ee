"""What happens to a callable inside its job, without a cluster."""

import ast
import os
import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
import submitit
from submitit.core.utils import DelayedSubmission

import towline
from towline.jobs.slurm import submission
from towline.jobs.slurm.environment import is_time_out, requeue_leader
from towline.jobs.slurm.submission import Submission, first_free_name, give_to_job, python_version
from towline.storage.errors import InputError, SlurmError

PICKLED = b"no pickle at all"


def identity() -> tuple[str, int, int, list[str]]:
    job = submitit.JobEnvironment()
    return job.job_id, job.global_rank, job.num_tasks, list(job.hostnames)


class SignalsItself:
    """Asks for its own checkpoint, as Slurm would."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def __call__(self) -> int:
        if self.start == 0:
            os.system(f"kill -USR2 {os.getpid()}")
        return self.start

    def checkpoint(self) -> DelayedSubmission:
        return DelayedSubmission(SignalsItself(self.start + 1))


class OnlySignalsItself:
    """It has no checkpoint."""

    def __call__(self) -> None:
        os.system(f"kill -USR2 {os.getpid()}")


def write(folder: Path, function: object, name: str = "callable", *, max_timeouts: int = 1, **facts: str) -> None:
    """Leave a submission as the executor does, its code inside the pickle."""
    delayed = DelayedSubmission(function)
    delayed.set_timeout(0, max_timeouts)
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    (folder / f"{name}.pkl").write_bytes(cloudpickle.dumps(delayed))
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    given = {"python": python_version(), "submitit": "1.5.4", "time": "60", "signal": "B:USR2@90"} | facts
    Submission(**given).write(folder / "callable.json")


def run_entry(folder: Path, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "12"} | environment
    command = [sys.executable, "-m", "towline.jobs.slurm.batch_entry", str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def note_scontrol(folder: Path) -> str:
    """A PATH with a scontrol that writes what it is asked to `asked`."""
    (folder / "scontrol").write_text(f'#!/bin/bash\necho "$@" > {folder}/asked\n')
    (folder / "scontrol").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def result(folder: Path, name: str) -> tuple[str, object]:
    return pickle.loads((folder / f"{name}_result.pkl").read_bytes())


def test_the_batch_step_has_the_leaders_id(tmp_path: Path) -> None:
    write(tmp_path, identity)
    done = run_entry(tmp_path, SLURM_JOB_NODELIST="n[1-2]", SLURM_NTASKS="2")
    assert done.returncode == 0, done.stderr
    assert result(tmp_path, "12_0") == ("success", ("12", 0, 2, ["n1", "n2"]))


def test_a_rank_of_a_component_has_its_id(tmp_path: Path) -> None:
    write(tmp_path, identity)
    write(tmp_path, identity, "callable+1")
    done = run_entry(
        tmp_path, "callable", "1", SLURM_JOB_ID_HET_GROUP_0="12", SLURM_PROCID="1", SLURM_NTASKS="3", SLURM_NNODES="3"
    )
    assert done.returncode == 0, done.stderr
    outcome, (job_id, rank, num_tasks, _) = result(tmp_path, "12+1_1")
    assert (outcome, job_id, rank, num_tasks) == ("success", "12+1", 1, 3)


def test_another_python_is_refused_before_unpickling(tmp_path: Path) -> None:
    # case G4-27
    write(tmp_path, identity, python="3.9.2")
    (tmp_path / "callable.pkl").write_bytes(PICKLED)
    done = run_entry(tmp_path)
    assert done.returncode == 2
    outcome, text = result(tmp_path, "12_0")
    assert outcome == "error"
    assert f"written by Python 3.9.2, but this node runs Python {python_version()}" in str(text)
    assert str(text).partition(": ")[2] in done.stderr


@pytest.mark.parametrize(("submitted", "node"), [("3.11.7", "3.9.2"), ("3.9.2", "3.11.7"), ("3.11.7", "3.12.7")])
def test_both_versions_are_named(submitted: str, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # case G4-27
    monkeypatch.setattr(submission, "python_version", lambda: node)
    written = Submission(python=submitted, submitit="1.5.4", time=None, signal=None)
    with pytest.raises(InputError, match=rf"written by Python {submitted}, but this node runs Python {node} "):
        written.check_python(Path("callable.pkl"))


def test_a_python_without_our_packages_names_both_versions_too(tmp_path: Path) -> None:
    # case G4-27: an older one fails at our imports, long before the check
    write(tmp_path, identity, python="3.9.2")
    source = str(Path(towline.__file__).parents[1])
    command = [sys.executable, "-S", "-m", "towline.jobs.slurm.batch_entry", str(tmp_path)]
    done = subprocess.run(command, env={"PYTHONPATH": source}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    both = f"{tmp_path}/callable.pkl was written by Python 3.9.2, but this node runs Python {python_version()} ("
    assert both in done.stderr
    assert "cannot import Towline: ModuleNotFoundError: No module named 'submitit'" in done.stderr


def test_what_says_so_is_understood_by_any_python() -> None:
    # case G4-27: `python -m` reads these before it can say a word
    source = Path(towline.__file__).parent
    for name in ("__init__.py", "jobs/__init__.py", "jobs/slurm/__init__.py", "jobs/slurm/batch_entry.py"):
        ast.parse((source / name).read_text(), feature_version=(3, 4))


def test_another_patch_release_of_python_will_do(tmp_path: Path) -> None:
    write(tmp_path, identity, python="{}.{}.99".format(*sys.version_info))
    assert run_entry(tmp_path).returncode == 0


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    done = run_entry(tmp_path)
    assert done.returncode == 2
    assert str(tmp_path / "callable.json") in done.stderr


def test_a_requeued_start_takes_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, SignalsItself())
    first = run_entry(tmp_path, PATH=note_scontrol(tmp_path))
    assert first.returncode != 0
    assert (tmp_path / "asked").read_text() == "requeue 12\n"
    assert not (tmp_path / "12_0_result.pkl").exists()
    (tmp_path / "12_0_result.pkl").write_bytes(b"of a rank that ended while the first start was stopped")
    assert run_entry(tmp_path, SLURM_RESTART_COUNT="1").returncode == 0
    assert result(tmp_path, "12_0") == ("success", 1)


def test_without_scontrol_the_checkpoint_is_kept_and_the_error_says_so(tmp_path: Path) -> None:
    # case G4-17
    write(tmp_path, SignalsItself())
    done = run_entry(tmp_path, PATH="/nowhere")
    assert done.returncode != 0
    outcome, text = result(tmp_path, "12_0")
    assert outcome == "error"
    assert "scontrol is not on PATH here" in str(text)
    assert f"its checkpoint is kept: {tmp_path / '12_submitted.pkl'}" in str(text)
    assert pickle.loads((tmp_path / "12_submitted.pkl").read_bytes()).function.start == 1


def test_a_signal_during_the_start_waits_for_the_callable(tmp_path: Path) -> None:
    write(tmp_path, SignalsItself(1))
    code = (
        "import os, signal, sys\n"
        "from towline.jobs.slurm import run_callable\n"
        "prepare = run_callable.prepare\n"
        "def signalled(*given):\n"
        "    os.kill(os.getpid(), signal.SIGUSR2)\n"
        "    prepare(*given)\n"
        "run_callable.prepare = signalled\n"
        f"run_callable.main([{str(tmp_path)!r}])\n"
    )
    environment = {"PATH": "/nowhere", "SLURM_JOB_ID": "12"}
    subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert pickle.loads((tmp_path / "12_submitted.pkl").read_bytes()).function.start == 2


@pytest.mark.parametrize(
    ("time", "requeued"),
    [
        ("5", True),  # well before the limit: a preemption
        ("10", True),
        ("1", False),  # the signal before the limit
    ],
)
def test_preemptions_use_up_no_time_out(tmp_path: Path, time: str, requeued: bool) -> None:
    # case G4-16
    write(tmp_path, SignalsItself(), max_timeouts=0, time=time)
    run_entry(tmp_path, PATH=note_scontrol(tmp_path))
    assert (tmp_path / "asked").exists() is requeued
    if not requeued:
        outcome, text = result(tmp_path, "12_0")
        assert outcome == "error"
        assert "not requeued because: timed-out too many times" in str(text)


def test_at_the_limit_a_callable_without_checkpoint_is_not_requeued(tmp_path: Path) -> None:
    # case G4-15: why the executor warns of it, and why what `towline submit` sends has one
    write(tmp_path, OnlySignalsItself(), time="1")
    run_entry(tmp_path, PATH=note_scontrol(tmp_path))
    assert not (tmp_path / "asked").exists()
    outcome, text = result(tmp_path, "12_0")
    assert outcome == "error"
    assert "not requeued because: timed-out and not checkpointable" in str(text)


def test_requeue_leader_is_for_the_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", note_scontrol(tmp_path))
    requeue_leader("12+1")
    assert (tmp_path / "asked").read_text() == "requeue 12\n"
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SlurmError, match="scontrol is not on PATH here"):
        requeue_leader("12")


@pytest.mark.parametrize(
    ("ran_s", "limit", "signal", "timed_out"),
    [
        # case G4-16
        (20, "5", "B:USR2@90", False),
        (300, "10", "B:USR2@90", False),
        (149, "5", "B:USR2@90", True),
        (20, "5", "USR2", False),
        (600, "60", "B:USR2@90", False),
        (3000, "60", "B:USR2@90", False),
        (3500, "60", "B:USR2@90", True),
        (3450, "60", "B:USR2@90", True),
        # case G4-14: it comes in the 58th minute
        (57 * 60, "60", "USR2@120", True),
        (58 * 60, "60", "USR2@120", True),
        (55 * 60, "60", "USR2@120", False),
        (10**6, "UNLIMITED", "B:USR2@90", False),
        (20, None, "B:USR2@90", True),
    ],
)
def test_a_preemption_well_before_the_limit_is_no_time_out(
    ran_s: float, limit: str | None, signal: str, timed_out: bool
) -> None:
    assert is_time_out(ran_s, time_limit=limit, signal_option=signal) == timed_out


def test_names_of_submissions_are_claimed_once(tmp_path: Path) -> None:
    assert [first_free_name(tmp_path / "new") for _ in range(3)] == ["callable", "callable-2", "callable-3"]


def test_a_checkpoint_is_not_replaced_by_what_was_submitted(tmp_path: Path) -> None:
    source, submitted = tmp_path / "callable.pkl", tmp_path / "12_submitted.pkl"
    source.write_text("submitted")
    give_to_job(source, submitted)
    submitted.write_text("checkpoint")
    give_to_job(source, submitted)
    assert submitted.read_text() == "checkpoint"
    give_to_job(source, submitted, replace=True)
    assert submitted.read_text() == "submitted"


def test_a_submission_of_another_program_is_refused(tmp_path: Path) -> None:
    (tmp_path / "callable.json").write_text('{"other": 1}')
    with pytest.raises(InputError, match=r"callable\.json"):
        Submission.read(tmp_path / "callable.json")
