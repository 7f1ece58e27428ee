"""A submitted job, and its state. Ids: `12` is the whole job, `12+1` its second component."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from submitit.core import core, logger
from submitit.core.utils import JobPaths, UncompletedJobError, pickle_load
from submitit.slurm.slurm import SlurmJob, SlurmJobEnvironment

from towline.jobs.slurm.command import slurm
from towline.jobs.slurm.text import parse_job_id
from towline.launcher.job_states import (
    GONE,
    ComponentState,
    States,
    StatesUnknown,
    all_ended,
    exit_code,
    job_states,
    overall,
)
from towline.storage.errors import SlurmError


class ComponentDied(SlurmError, UncompletedJobError):
    """A component ended without a result. Says which, its Slurm state, its exit code and where its log is."""


class HetInfoWatcher(core.InfoWatcher):
    """Shared by all jobs of this process, so that Slurm is asked once for all of them, less and less often."""

    lag_s = 30.0
    """After its submission, a job that neither sacct nor squeue knows is taken for pending this long."""

    def __init__(self, delay_s: int = 60) -> None:
        super().__init__(delay_s)
        self._states: dict[str, States] = {}
        self._submitted: dict[str, float] = {}

    def register_job(self, job_id: str) -> None:
        super().register_job(job_id)
        self._submitted.setdefault(parse_job_id(job_id).job, time.monotonic())

    def update(self) -> None:
        """Ask for every job that has not ended. Slurm's controller may be away for minutes: the last answer stands."""
        open_jobs = {parse_job_id(job_id).job for job_id in self._registered - self._finished}
        if not open_jobs:
            return
        self._num_calls += 1
        try:
            answer = job_states(open_jobs)
        except StatesUnknown as error:
            logger.get_logger().warning(f"States of jobs may be out of date: {error}")
        else:
            self._states |= {job: self._believed(job, states) for job, states in answer.items()}
        self._last_status_check = time.time()
        self._finished |= {job_id for job_id in self._registered - self._finished if self.is_done(job_id, "cache")}

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        return self.get_info(job_id, mode).get("State", "UNKNOWN")

    def get_info(self, job_id: str, mode: str = "standard") -> dict[str, str]:
        """JobID, State, ExitCode and NodeList of a component; of a whole job the State by `overall`."""
        states = self.states(job_id, mode)
        if not states:
            return {}
        component = parse_job_id(job_id).component
        if component is None:
            row = ComponentState(overall([row.state for row in states.values()]))
        else:
            row = states.get(component, next(iter(states.values())))
        return {"JobID": job_id, "State": row.state, "ExitCode": row.exit_code, "NodeList": row.nodes}

    def is_done(self, job_id: str, mode: str = "standard") -> bool:
        """Whether all components have ended, of which one alone decides when it failed what `get_state` says."""
        states = self.states(job_id, mode)
        component = parse_job_id(job_id).component
        asked = [states[component]] if component in states else states.values()
        return bool(states) and all_ended([row.state for row in asked])

    def states(self, job_id: str, mode: str = "standard") -> States:
        """By component, of the whole job; empty before the first answer."""
        if job_id not in self._registered:
            self.register_job(job_id)
        self.update_if_long_enough(mode)
        return self._states.get(parse_job_id(job_id).job, {})

    def clear(self) -> None:
        super().clear()
        self._states.clear()

    def _believed(self, job: str, states: States) -> States:
        """A job just submitted may not be known yet; of one that is forgotten, the last state counts if it ended so."""
        if any(row.state != GONE for row in states.values()):
            return states
        before = self._states.get(job, {})
        if before and all_ended([row.state for row in before.values()]):
            return before
        young = time.monotonic() - self._submitted[job] < self.lag_s
        return {0: ComponentState("PENDING")} if young else states


class HetSlurmJob(SlurmJob[Any]):
    """The whole job, whose result is that of the batch step, or one component of `submit_components`.

    A result is believed as soon as it is there. A rank that returns while Slurm is stopping it for a requeue (KillWait,
    30 s unless the site says otherwise) therefore gives the result of a job that runs again; the next start removes it.

    Args:
        components: names in the order of the script, of the whole job or of this component alone.
        batch_logs: where the batch step writes, if not where submitit has it.
    """

    watcher = HetInfoWatcher(delay_s=60)

    def __init__(
        self,
        folder: Path | str,
        job_id: str,
        tasks: Sequence[int] = (0,),
        *,
        components: Sequence[str] = (),
        batch_logs: Sequence[Path] = (),
    ) -> None:
        super().__init__(folder=folder, job_id=job_id, tasks=tasks)
        batch = JobPaths(self.paths.folder, self.leader_id)
        self._names = tuple(components)
        self.batch_logs = tuple(batch_logs) or (batch.stderr, batch.stdout)
        for rank in self._sub_jobs:
            assert isinstance(rank, HetSlurmJob)
            rank._names, rank.batch_logs = self._names, self.batch_logs

    @property
    def leader_id(self) -> str:
        return parse_job_id(self.job_id).job

    @property
    def components(self) -> Mapping[str, str]:
        """Ids by name: {"trainer": "12+0", "rollout": "12+1"}."""
        component = parse_job_id(self.job_id).component
        first = 0 if component is None else component
        return {name: f"{self.leader_id}+{number}" for number, name in enumerate(self._names, first)}

    def component_states(self) -> dict[str, str]:
        """One of Slurm's words for each component, asked now."""
        self.watcher.get_info(self.job_id, mode="force")
        return {name: self.watcher.get_state(id, mode="cache") for name, id in self.components.items()}

    def cancel(self, check: bool = True) -> None:
        """All components: to cancel one of them would leave the others running.

        Args:
            check: raise SlurmError if scancel refuses.
        """
        try:
            slurm(["scancel", self.leader_id])
        except SlurmError:
            if check:
                raise

    def _interrupt(self, timeout: bool = False) -> None:
        """As Slurm does before it preempts the job, or before its time limit; for tests."""
        if not timeout:
            slurm(["scancel", "--batch", "--signal=TERM", self.leader_id])
        slurm(["scancel", "--batch", f"--signal={SlurmJobEnvironment.USR_SIG}", self.leader_id])

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        try:
            return super()._get_outcome_and_result()
        except UncompletedJobError as error:
            self._raise_died(error)

    def _raise_died(self, error: UncompletedJobError) -> NoReturn:
        self.watcher.get_info(self.job_id, mode="force")
        states = self.watcher.states(self.job_id, "cache")
        lines = [
            f"  {name} ({id}): {row.state}, exit code {row.exit_code or exit_code(id) or 'not known'}, "
            f"nodes {row.nodes or 'none'}"
            for name, id in self.components.items()
            if (row := states.get(parse_job_id(id).component or 0)) is not None
        ]
        who = f"component {self._names[0]} ({self.job_id})" if self._is_component else f"job {self.job_id}"
        logs = (self.paths.stderr, self.paths.stdout) if self._is_component else self.batch_logs
        died = [
            f"{who}, rank {self.task_id or 0}, ended without a result: {self.paths.result_pickle} is missing.",
            *lines,
            *self._first_to_end(),
            f"Its log: {' and '.join(map(str, logs))}",
            *_last_lines(logs[0]),
        ]
        raise ComponentDied("\n".join(died)) from error

    @property
    def _is_component(self) -> bool:
        return parse_job_id(self.job_id).component is not None

    def _first_to_end(self) -> list[str]:
        """What the batch step, which watches the components, says of it; it ends after them."""
        if not self._is_component:
            return []
        try:
            outcome, trace = pickle_load(JobPaths(self.paths.folder, self.leader_id).result_pickle)
        except OSError:
            return [f"Log of the whole job: {self.batch_logs[0]}"]
        return [f"Of the whole job: {trace.strip().splitlines()[-1]}"] if outcome == "error" else []


def _last_lines(log: Path, num_bytes: int = 2000) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - num_bytes), os.SEEK_SET)
            text = file.read().decode(errors="replace").strip()
    except OSError:
        return []
    return ["Its last lines:", text] if text else []
