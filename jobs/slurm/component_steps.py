"""Run one function per component of a heterogeneous job: a step each, started and watched from the batch step.

This is itself the callable of the batch step. Each component is one `srun`, so one MPI world of its own; its ranks run
`batch_entry` for the component. The first step that fails ends the others and the job. Imports no torch.
"""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from submitit import JobEnvironment
from submitit.core.utils import DelayedSubmission

from towline.jobs.slurm.environment import HetSlurmJobEnvironment, marker
from towline.storage.errors import SlurmError

POLL_S = 0.2
_CPUS_OF_THE_LEADER = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK")
"""Some versions of srun take them over, for any component, and stop where they differ."""
CHECKPOINT_S = 20.0
"""A component that has not written its checkpoint by then starts from its last one."""
END_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What srun is told for one component."""

    name: str
    num_tasks: int
    cpus_per_task: str | None = None
    """Not every version of srun takes it over from the job: not from 22.05 on."""


@dataclass(kw_only=True)
class ComponentSteps:
    """Not requeued when its time is over; `CheckpointableSteps` is."""

    components: Sequence[Component]
    command: str
    """Shell words that run `batch_entry` with folder and name; a component's number is appended."""
    folder: Path
    _steps: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, object]:
        """A checkpoint is taken while steps run, which belong to this process."""
        return {**self.__dict__, "_steps": {}}

    def __call__(self) -> Mapping[str, int]:
        """Return the exit codes, all 0.

        Raises:
            SlurmError: names the component whose step failed first, its exit code and where its logs are.
        """
        for path in self._markers():
            path.unlink(missing_ok=True)
        try:
            for number, component in enumerate(self.components):
                self._steps[component.name] = self._start(number, component)
            self._watch()
        finally:
            self._end()
        return {name: step.returncode for name, step in self._steps.items()}

    def _start(self, number: int, component: Component) -> "subprocess.Popen[bytes]":
        options = [f"--ntasks={component.num_tasks}", "--unbuffered", "--kill-on-bad-exit=1", "--quit-on-interrupt"]
        if len(self.components) > 1:
            options.append(f"--het-group={number}")
        if component.cpus_per_task is not None:
            options.append(f"--cpus-per-task={component.cpus_per_task}")
        logs = self._logs(number)
        options += [f"--output={logs}.out", f"--error={logs}.err", "--open-mode=append"]
        words = f"exec srun {shlex.join(options)} {self.command} {number}"
        environment = {variable: value for variable, value in os.environ.items() if variable not in _CPUS_OF_THE_LEADER}
        # Out of our process group, so that whatever signals the group leaves the step to us.
        return subprocess.Popen(
            ["bash", "-c", words], env=environment, stdin=subprocess.DEVNULL, start_new_session=True
        )

    def _watch(self) -> None:
        """Until all have ended well, or one has not."""
        while any(step.poll() is None for step in self._steps.values()):
            self._raise_first_failure()
            if any(path.exists() for path in self._markers()):
                # `scancel --signal` without --batch reaches the steps alone: take part in what they have begun.
                os.kill(os.getpid(), HetSlurmJobEnvironment._usr_sig())
            time.sleep(POLL_S)
        self._raise_first_failure()

    def _raise_first_failure(self) -> None:
        for number, (name, step) in enumerate(self._steps.items()):
            if step.poll():
                raise SlurmError(
                    f"component {name} of job {self._job().leader_id} ended with exit code {step.returncode}; "
                    f"the other components were ended. Its logs: {self._logs(number)}.err and .out, %t being the rank"
                )

    def _end(self) -> None:
        """An interrupt makes srun kill its step at once; ranks bypass SIGTERM, which also announces a preemption."""
        running = [step for step in self._steps.values() if step.poll() is None]
        for step in running:
            step.send_signal(signal.SIGINT)
        deadline = time.monotonic() + END_S
        for step in running:
            try:
                step.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                step.kill()

    def _wait_for_checkpoints(self) -> None:
        """Have each running component write its checkpoint, at most CHECKPOINT_S."""
        deadline = time.monotonic() + CHECKPOINT_S
        waiting = {  # of those that have been started by now
            path: step
            for path, step in zip(self._markers(), self._steps.values(), strict=False)
            if step.poll() is None and not path.exists()
        }
        for step in waiting.values():
            step.send_signal(HetSlurmJobEnvironment._usr_sig())
        while waiting and time.monotonic() < deadline:
            waiting = {path: step for path, step in waiting.items() if step.poll() is None and not path.exists()}
            time.sleep(POLL_S)
        for path in waiting:
            print(f"no checkpoint within {CHECKPOINT_S:g} s: {path} is missing", flush=True)

    def _markers(self) -> list[Path]:
        job = self._job()
        return [marker(self.folder, job.leader_id, number, job.num_restarts) for number in range(len(self.components))]

    def _logs(self, number: int) -> Path:
        """srun puts the rank for %t."""
        return self.folder / f"{self._job().leader_id}+{number}_%t_log"

    @staticmethod
    def _job() -> HetSlurmJobEnvironment:
        job = JobEnvironment()
        assert isinstance(job, HetSlurmJobEnvironment)
        return job


class CheckpointableSteps(ComponentSteps):
    """Some component has a `checkpoint`."""

    def checkpoint(self) -> DelayedSubmission:
        self._wait_for_checkpoints()
        return DelayedSubmission(self)
