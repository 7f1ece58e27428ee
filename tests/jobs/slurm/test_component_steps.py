"""The batch step and the ranks of its components, with a srun that starts them here."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cloudpickle
import pytest
import submitit
from submitit.core.utils import DelayedSubmission

from towline.jobs.slurm.component_steps import CheckpointableSteps, Component, ComponentSteps
from towline.jobs.slurm.submission import Submission

SRUN = """\
for option in "$@"; do
    case $option in
        --het-group=*) ;;
        --ntasks=*) tasks=${option#*=} ;;
        --output=*) logs=${option#--output=} ;;
        --*) ;;
        *) break ;;
    esac
    echo "$option" >> "$CALLS/options"
    shift
done
env | grep CPUS_PER_TASK >> "$CALLS/cpus"
trap 'kill -USR2 "${ranks[@]}"' USR2
trap 'kill -KILL "${ranks[@]}"; exit 130' INT
for rank in $(seq 0 $((tasks - 1))); do
    SLURM_PROCID=$rank SLURM_NTASKS=$tasks "$@" > "${logs//%t/$rank}" 2>&1 &
    ranks+=($!)
done
status=0
for rank in "${ranks[@]}"; do
    wait "$rank"; ended=$?
    while kill -0 "$rank" 2> /dev/null; do wait "$rank"; ended=$?; done
    [ $ended = 0 ] || status=$ended
done
exit $status
"""


def who() -> tuple[str, int]:
    job = submitit.JobEnvironment()
    return job.job_id, job.global_rank


def fail() -> None:
    sys.exit(7)


def wait_long() -> None:
    time.sleep(60)


class Slow:
    """Its checkpoint takes long enough for a second signal to come."""

    def __init__(self, running: Path, start: int = 0) -> None:
        self.running = running
        self.start = start

    def __call__(self) -> int:
        if self.start == 0:
            job = submitit.JobEnvironment()
            pid = Path(f"{self.running}{job.job_id}_{job.global_rank}.pid")
            pid.write_text(str(os.getpid()))
            pid.rename(pid.with_suffix(""))
            time.sleep(60)
        return self.start

    def checkpoint(self) -> DelayedSubmission:
        time.sleep(0.5)
        return DelayedSubmission(Slow(self.running, self.start + 1))


class BatchStep:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, body in {"srun": SRUN, "scontrol": 'echo "$@" >> "$CALLS/asked"'}.items():
            (folder / name).write_text(f"#!/bin/bash\n{body}\n")
            (folder / name).chmod(0o755)

    def start(self, functions: dict[str, Callable[[], object]], restarts: int = 0) -> "subprocess.Popen[bytes]":
        if not restarts:
            self._write(functions)
        environment = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "CALLS": str(self.folder),
            "SLURM_JOB_ID": "12",
            "SLURM_CPUS_PER_TASK": "16",
            "SRUN_CPUS_PER_TASK": "8",
            "SLURM_RESTART_COUNT": str(restarts),
        }
        command = [sys.executable, "-m", "towline.jobs.slurm.batch_entry", str(self.folder)]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def _write(self, functions: dict[str, Callable[[], object]]) -> None:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        checkpointable = any(hasattr(function, "checkpoint") for function in functions.values())
        steps = (CheckpointableSteps if checkpointable else ComponentSteps)(
            components=[Component(name=name, num_tasks=2, cpus_per_task="3") for name in functions],
            command=f"{sys.executable} -m towline.jobs.slurm.batch_entry {self.folder} callable",
            folder=self.folder,
        )
        callables = {f"callable+{number}": function for number, function in enumerate(functions.values())}
        for name, function in {"callable": steps, **callables}.items():
            delayed = DelayedSubmission(function)
            delayed.set_timeout(60, 1)
            (self.folder / f"{name}.pkl").write_bytes(cloudpickle.dumps(delayed))
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
        Submission.of(time="60", signal=None).write(self.folder / "callable.json")

    def result(self, name: str) -> tuple[str, object]:
        return pickle.loads((self.folder / f"{name}_result.pkl").read_bytes())

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 30
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, f"no {names}"
            time.sleep(0.05)


@pytest.fixture
def batch_step(tmp_path: Path) -> BatchStep:
    return BatchStep(tmp_path)


def test_every_rank_of_every_component_has_a_result(batch_step: BatchStep) -> None:
    assert batch_step.start({"trainer": who, "rollout": who}).wait(30) == 0
    assert batch_step.result("12_0") == ("success", {"trainer": 0, "rollout": 0})
    for component in (0, 1):
        for rank in (0, 1):
            assert batch_step.result(f"12+{component}_{rank}") == ("success", (f"12+{component}", rank))
    options = (batch_step.folder / "options").read_text().splitlines()
    assert {"--het-group=0", "--het-group=1", "--ntasks=2", "--cpus-per-task=3", "--kill-on-bad-exit=1"} <= set(options)
    assert f"--output={batch_step.folder}/12+1_%t_log.out" in options
    # case G4-12: of another component's number, or of two, nothing is left
    assert (batch_step.folder / "cpus").read_text() == ""
    # case G4-17
    assert "--open-mode=append" in options


def test_one_component_is_a_step_of_an_ordinary_job(batch_step: BatchStep) -> None:
    assert batch_step.start({"all": who}).wait(30) == 0
    assert batch_step.result("12+0_1") == ("success", ("12+0", 1))
    assert "--het-group" not in (batch_step.folder / "options").read_text()


def test_the_first_failure_ends_the_others_and_is_named(batch_step: BatchStep) -> None:
    began = time.monotonic()
    assert batch_step.start({"trainer": wait_long, "rollout": fail}).wait(30) != 0
    assert time.monotonic() - began < 20
    outcome, text = batch_step.result("12_0")
    assert outcome == "error"
    assert "component rollout of job 12 ended with exit code 7" in str(text)
    assert f"{batch_step.folder}/12+1_%t_log.err" in str(text)


def test_a_signal_to_the_batch_step_checkpoints_all_components(batch_step: BatchStep) -> None:
    functions = {"trainer": Slow(batch_step.folder / "running"), "rollout": Slow(batch_step.folder / "running")}
    step = batch_step.start(functions)
    batch_step.wait_for("running12+0_0", "running12+0_1", "running12+1_0", "running12+1_1")
    step.send_signal(signal.SIGUSR2)
    time.sleep(0.2)
    step.send_signal(signal.SIGUSR2)
    assert step.wait(30) != 0
    assert (batch_step.folder / "asked").read_text() == "requeue 12\n"
    assert not (batch_step.folder / "12_0_result.pkl").exists()
    assert batch_step.start(functions, restarts=1).wait(30) == 0
    assert batch_step.result("12+0_0") == batch_step.result("12+1_1") == ("success", 1)


def test_a_signal_that_only_the_steps_received_reaches_the_batch_step(batch_step: BatchStep) -> None:
    # case G4-14: `--signal=USR2@120` without B: is not for the batch step, which alone can requeue
    functions = {"trainer": Slow(batch_step.folder / "running"), "rollout": Slow(batch_step.folder / "running")}
    step = batch_step.start(functions)
    ranks = ["running12+0_0", "running12+0_1", "running12+1_0", "running12+1_1"]
    batch_step.wait_for(*ranks)
    for rank in ranks:
        os.kill(int((batch_step.folder / rank).read_text()), signal.SIGUSR2)
    assert step.wait(30) != 0
    assert (batch_step.folder / "asked").read_text() == "requeue 12\n"
    assert batch_step.start(functions, restarts=1).wait(30) == 0
    assert batch_step.result("12+0_0") == batch_step.result("12+1_1") == ("success", 1)
