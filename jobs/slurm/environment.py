"""What submitit knows of the job around it, when that job is one of ours: ids, signals, requeue. Imports no torch.

`--signal=B:USR2@n` comes n seconds before the time limit, up to a minute earlier, or whenever someone runs
`scancel --batch --signal=USR2`: rank 0 calls the callable's `checkpoint`, writes what it returns in the callable's
place and requeues the leader, which starts every component again under the same ids. A preemption, `scontrol requeue`
and a lost node start the job again without USR2, so without a checkpoint.
"""

import os
import re
import signal
import time
from pathlib import Path
from types import FrameType
from typing import ClassVar

import submitit
from submitit.core import job_environment, plugins
from submitit.core.utils import DelayedSubmission, JobPaths
from submitit.slurm.slurm import SlurmJobEnvironment

from towline.jobs.slurm.command import slurm
from towline.jobs.slurm.submission import Submission
from towline.jobs.slurm.text import parse_job_id, time_limit_s
from towline.storage.errors import SlurmError

COMPONENT = "TOWLINE_COMPONENT"
SUBMISSION = "TOWLINE_SUBMISSION"
SIGNAL_EARLY_S = 60
"""Slurm may send --signal this much before the moment that was asked."""
START_UP_S = 30
"""From the start of a job until its signal handlers are there, at most."""


class HetSlurmJobEnvironment(SlurmJobEnvironment):
    """The batch step of a job (id `12`), or a rank of a component's step (`12+1`, ranks from 0)."""

    came_early: ClassVar[bool] = False
    """The signal to checkpoint came before there was something to checkpoint."""

    @classmethod
    def name(cls) -> str:
        return "hetslurm"

    @property
    def component(self) -> int | None:
        """None in the batch step, which has the whole job."""
        text = os.environ.get(COMPONENT)
        return None if text is None else int(text)

    @property
    def leader_id(self) -> str:
        """Slurm gives the leader's id to the steps of all components."""
        return os.environ.get("SLURM_JOB_ID_HET_GROUP_0", os.environ["SLURM_JOB_ID"])

    @property
    def job_id(self) -> str:
        return self.raw_job_id

    @property
    def raw_job_id(self) -> str:
        return self.leader_id if self.component is None else f"{self.leader_id}+{self.component}"

    @property
    def num_restarts(self) -> int:
        return int(os.environ.get("SLURM_RESTART_COUNT", "0"))

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        handler = HetSignalHandler(self, paths, submission)
        signal.signal(signal.SIGTERM, handler.bypass)
        signal.signal(signal.SIGCONT, handler.bypass)
        on_signal = handler.checkpoint_and_try_requeue if self.component is None else handler.checkpoint_and_wait
        signal.signal(self._usr_sig(), on_signal)
        if self.came_early:
            HetSlurmJobEnvironment.came_early = False
            os.kill(os.getpid(), self._usr_sig())

    def _requeue(self, countdown: int) -> None:
        try:
            requeue_leader(self.leader_id)
        except SlurmError as error:
            kept = self.paths.submitted_pickle
            raise SlurmError(f"{error}\nThe job is not requeued; its checkpoint is kept: {kept}") from error


class HetSignalHandler(job_environment.SignalHandler):
    """submitit's, with another count of time-outs, and with components that wait to be requeued."""

    def __init__(self, env: HetSlurmJobEnvironment, job_paths: JobPaths, delayed: DelayedSubmission) -> None:
        super().__init__(env, job_paths, delayed)
        self.environment = env
        self.signalled = False
        self.submission = Submission.read(Path(os.environ["SUBMITIT_FOLDER"]) / f"{os.environ[SUBMISSION]}.json")

    def has_timed_out(self) -> bool:
        """Whether this signal ends the time limit, which uses up one of `max_num_timeout`, or is a preemption.

        submitit takes any signal after min(0.8 limit, limit - 10 min) for a time-out, which for limits up to ten
        minutes is every signal.
        """
        limit, ran_s = self.submission.time, time.time() - self._start_time
        timed_out = is_time_out(ran_s, time_limit=limit, signal_option=self.submission.signal)
        ending = "the end of its time" if timed_out else "not the end of its time"
        self._logger.info(f"Signal after {ran_s:.0f} s, limit {limit or 'of the partition'}: {ending}.")
        return timed_out

    def checkpoint_and_try_requeue(self, signum: int, frame: FrameType | None = None) -> None:
        """In the batch step: the first signal ends this start, by a requeue or an error; others may follow it."""
        if not self.signalled:
            self.signalled = True
            super().checkpoint_and_try_requeue(signum, frame)

    def checkpoint_and_wait(self, signum: int, frame: FrameType | None = None) -> None:
        """In a component's rank 0: write the checkpoint, say so by a marker, go on until the job is requeued."""
        env = self.environment
        assert env.component is not None
        if env.global_rank != 0 or self.signalled:
            self._logger.info("Not rank 0, or done already: nothing to checkpoint.")
            return
        self.signalled = True
        if hasattr(self._delayed.function, "checkpoint"):
            countdown = self._delayed._timeout_countdown
            reason = job_environment._checkpoint(self._delayed, self._job_paths.submitted_pickle, countdown)
            if reason:
                self._logger.warning(f"The component will start from its last checkpoint: {reason}.")
        marker(env.paths.folder, env.leader_id, env.component, env.num_restarts).touch()


def marker(folder: Path, leader_id: str, component: int, num_restarts: int) -> Path:
    """There when the component's rank 0 has done what is to be done before a requeue of this start."""
    return folder / f"{leader_id}+{component}_checkpoint_{num_restarts}.done"


def is_time_out(ran_s: float, *, time_limit: str | None, signal_option: str | None) -> bool:
    """Whether a signal that came `ran_s` after the start is the one before the time limit.

    A limit that is not known counts as reached: a job must not be requeued without end.
    """
    if time_limit is None:
        return True
    limit_s = time_limit_s(time_limit)
    if limit_s is None:
        return False
    found = re.search(r"@(\d+)$", signal_option or "")
    lead_s = int(found[1]) if found else 60 if signal_option else 0
    return ran_s >= limit_s - lead_s - SIGNAL_EARLY_S - START_UP_S


def requeue_leader(job_id: str) -> None:
    """Start the whole job again under its ids, whichever component's `job_id` is; this start is ended by Slurm.

    Raises:
        SlurmError: scontrol is not on PATH, as in a container, or refuses; what was checkpointed is on disk.
    """
    slurm(["scontrol", "requeue", parse_job_id(job_id).job])


def own_script() -> Path:
    """What this job was submitted with; to submit it again."""
    return Path(os.environ["SUBMITIT_FOLDER"]) / f"{os.environ[SUBMISSION]}.sh"


def activate(folder: Path, name: str, component: int | None) -> HetSlurmJobEnvironment:
    """Make `submitit.JobEnvironment()` in this process the one of our job.

    A signal that comes before the callable is loaded waits until there is something to checkpoint; it would kill us.
    """
    signal.signal(HetSlurmJobEnvironment._usr_sig(), _keep_until_loaded)
    os.environ |= {"SUBMITIT_EXECUTOR": HetSlurmJobEnvironment.name(), "SUBMITIT_FOLDER": str(folder), SUBMISSION: name}
    os.environ.pop(COMPONENT, None)
    if component is not None:
        os.environ[COMPONENT] = str(component)
    _, environments = plugins._get_plugins()
    if not any(isinstance(known, HetSlurmJobEnvironment) for known in environments):
        environments.append(HetSlurmJobEnvironment())
        plugins.get_job_environments.cache_clear()
    environment = submitit.JobEnvironment()
    assert isinstance(environment, HetSlurmJobEnvironment)
    return environment


def _keep_until_loaded(signum: int, frame: FrameType | None) -> None:
    HetSlurmJobEnvironment.came_early = True
