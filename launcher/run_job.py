"""The Slurm job of a run: which it is, in which state, on which nodes. Asked of Slurm, never taken from files."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from towline.jobs.slurm.command import slurm
from towline.jobs.slurm.text import expand_nodes, first_word, parse_job_id, time_limit_s
from towline.launcher.job_states import GONE, StatesUnknown, exit_code, job_states, overall
from towline.storage.errors import SlurmError
from towline.storage.run_directory import RunDirectory, read_jsonl

WAITING = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "CONFIGURING"}
)
HALTED = frozenset({"SUSPENDED", "STOPPED"})
_FORMAT = "--format=%i|%T|%r|%S|%D|%N|%L|%V|%o"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobComponent:
    name: str
    state: str
    """One word of Slurm's."""
    reason: str
    start: float | None
    """Or the expected start, s since the epoch."""
    num_nodes: int
    nodes: tuple[str, ...]
    """Empty while it waits."""
    limit_end: float | None
    """When the time limit ends it, s since the epoch; None without a limit, and while it waits."""
    since: float | None
    """Submitted or requeued, s since the epoch."""

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJob:
    id: str
    components: tuple[JobComponent, ...] = ()
    """Of a job that waits or runs."""
    end: str = ""
    """Of one that has ended, Slurm's word, or GONE."""
    end_detail: str = ""
    """By component, with exit codes."""
    silence: str = ""
    """Why Slurm says nothing about it."""

    @property
    def is_alive(self) -> bool:
        return bool(self.components)

    @property
    def is_waiting(self) -> bool:
        return bool(self.waiting)

    @property
    def waiting(self) -> tuple[JobComponent, ...]:
        return tuple(part for part in self.components if part.is_waiting)

    @property
    def is_ending(self) -> bool:
        """Slurm takes its nodes away one by one."""
        return any(part.state == "COMPLETING" for part in self.components)

    @property
    def is_halted(self) -> bool:
        return any(part.state in HALTED for part in self.components)

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node for part in self.components for node in part.nodes)

    def lost(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Of the nodes with which the attempt began, those that Slurm has taken out of the job."""
        return tuple(node for node in nodes if node not in self.nodes)

    def __str__(self) -> str:
        if self.is_alive:
            return f"{self.id} ({overall([part.state for part in self.components]).lower()})"
        return f"{self.id} ({self.end.lower() or 'unknown'})"


def run_job(run: RunDirectory) -> RunJob | None:
    """The job that runs, else the one that waits, else the newest; None if none was handed in."""
    jobs = recorded_jobs(run)
    newest = jobs[-1] if jobs else None
    try:
        alive = live_jobs(run)
        if alive:
            return min(alive, key=lambda job: job.is_waiting)
        return None if newest is None else _ended(newest)
    except SlurmError as error:
        return None if newest is None else RunJob(id=newest, silence=str(error).partition("\n")[0])


def live_jobs(run: RunDirectory) -> list[RunJob]:
    """Jobs of the run that wait or run, the oldest first; also successors and scripts that nobody has noted yet.

    Raises:
        SlurmError: squeue does not answer.
    """
    recorded, scripts = recorded_jobs(run), run.slurm.resolve()
    rows: dict[str, list[JobComponent]] = {}
    for line in slurm(["squeue", "--noheader", "--all", "--me", _FORMAT], timeout_s=20).splitlines():
        fields = [field.strip() for field in line.split("|", 8)]
        if len(fields) != 9 or not fields[0][:1].isdigit():
            continue
        id = parse_job_id(fields[0])
        if id.job in recorded or Path(fields[8]).parent.resolve() == scripts:
            rows.setdefault(id.job, []).append(_component(run, id.component, fields))
    return [RunJob(id=job, components=tuple(rows[job])) for job in sorted(rows, key=int)]


def recorded_jobs(run: RunDirectory) -> list[str]:
    """In the order of their submission, each once: the one who submits and the job itself both write it down."""
    return list(dict.fromkeys(str(row["job"]) for row in read_jsonl(run.submissions)))


def component_names(run: RunDirectory) -> tuple[str, ...]:
    """As the newest submission that says them has them."""
    named = (row["components"] for row in reversed(read_jsonl(run.submissions)) if row.get("components"))
    return tuple(next(named, ()))


def _component(run: RunDirectory, number: int | None, fields: list[str]) -> JobComponent:
    _, state, reason, start, num_nodes, nodes, left, since, _ = fields
    names = component_names(run)
    name = names[number or 0] if (number or 0) < len(names) else f"component {number or 0}"
    return JobComponent(
        name=name,
        state=first_word(state),
        reason=reason,
        start=_moment(start),
        num_nodes=int(num_nodes.partition("-")[0]),
        nodes=expand_nodes(nodes),
        limit_end=_limit_end(left) if nodes else None,
        since=_moment(since),
    )


def _ended(job: str) -> RunJob:
    """
    Raises:
        SlurmError: neither accounting nor the controller answers.
    """
    try:
        states = job_states([job]).get(job, {})
    except StatesUnknown as error:
        if "Invalid job id" not in str(error):
            raise
        states = {}  # no accounting here, and the controller has forgotten it
    if not states:
        return RunJob(id=job, end=GONE, end_detail="Slurm has forgotten it")
    end = overall([row.state for row in states.values()])
    parts = [
        f"{job}+{number} {row.state}, exit code {_exit_text(row.exit_code or exit_code(f'{job}+{number}'))}"
        if len(states) > 1
        else f"{row.state}, exit code {_exit_text(row.exit_code or exit_code(job))}"
        for number, row in sorted(states.items())
    ]
    return RunJob(id=job, end=end, end_detail="; ".join(parts))


def _exit_text(code: str) -> str:
    """`1:0` is code and signal."""
    status, _, number = code.partition(":")
    return "not known" if not code else f"{status}, signal {number}" if number not in ("", "0") else status


def _moment(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:  # N/A
        return None


def _limit_end(left: str) -> float | None:
    try:
        seconds = time_limit_s(left)
    except SlurmError:  # INVALID, NOT_SET
        return None
    return None if seconds is None else time.time() + seconds
