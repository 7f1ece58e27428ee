"""What `towline status` says of a run's job in Slurm's queue and on its nodes."""

from collections.abc import Iterator

from towline.jobs.experiment import ExperimentConfig
from towline.jobs.experiment_parts import NodesConfig
from towline.jobs.slurm.attempts import AttemptBook, AttemptRow
from towline.launcher.pending_reasons import reason_text
from towline.launcher.run_job import JobComponent, RunJob
from towline.launcher.start_estimate import when
from towline.launcher.summary import duration
from towline.storage.run_directory import RunDirectory, read_jsonl


def job_lines(run: RunDirectory, experiment: ExperimentConfig, job: RunJob, word: str, now: float) -> Iterator[str]:
    """Where it waits, or where it runs, and what it has cost."""
    if job.silence:
        yield f"! Slurm does not answer, so this is what the files say: {job.silence}"
    elif job.is_waiting:
        yield from _waiting_lines(job, now)
    elif job.is_ending:
        yield f"slurm   job {job.id} ends: its nodes are given back"
    elif job.is_alive:
        yield _nodes_line(experiment, job, now)
        if lost := job.lost(_nodes_of_attempt(run, job)):
            yield f"! lost nodes: {', '.join(lost)}"
    elif word in ("LOST", "CANCELLED", "FAILED"):
        yield f"slurm   job {job.id}: {job.end_detail}"
    if cost := _cost_line(run, experiment):
        yield cost


def history_text(run: RunDirectory, job: RunJob) -> str:
    """Such as " (requeued twice: 1 time-out, 1 preemption; 3 min of work redone)"; empty for a first attempt."""
    rows = AttemptBook(run).rows()
    ends = rows if job.is_waiting else rows[:-1]
    requeues = sum(row.job == job.id for row in rows) - (0 if job.is_waiting else 1)
    causes = ", ".join(
        _count(number, what)
        for what, outcomes in (
            ("time-out", ("limit",)),
            ("preemption", ("preempted",)),
            ("lost node", ("node lost",)),
            ("kill", ("",)),
        )
        if (number := sum(row.outcome in outcomes for row in ends))
    )
    redone = _redone_s(run, rows)
    parts = [
        *([f"requeued {_times(requeues)}{f': {causes}' if causes else ''}"] if requeues > 0 else [causes]),
        *([f"{duration(redone)} of work redone"] if redone else []),
    ]
    said = "; ".join(filter(None, parts))
    return f" ({said})" if said else ""


def waits_text(job: RunJob, now: float) -> str:
    since = max((part.since for part in job.waiting if part.since is not None), default=None)
    return "" if since is None else f" since {when(since)} ({duration(max(0.0, now - since))})"


def _waiting_lines(job: RunJob, now: float) -> Iterator[str]:
    for reason in dict.fromkeys(part.reason for part in job.waiting):
        yield f"why     {reason_text(reason, job.id)}"
    starts = [part.start for part in job.waiting]
    known = [start for start in starts if start is not None]
    if len(known) < len(starts) or max(known) < now:
        yield "start   Slurm has no estimate yet"
    else:
        yield f"start   {when(max(known))} at the earliest (Slurm's estimate)"
    for part in job.components if len(job.components) > 1 else ():
        if part.is_waiting:
            yield f"{part.name:7} {_count(part.num_nodes, 'node')}  {part.state}  {part.reason}{_own_start(part, now)}"
        else:  # the start before is not over everywhere
            yield f"{part.name:7} {part.state}"


def _own_start(part: JobComponent, now: float) -> str:
    return f"  {when(part.start)}" if part.start is not None and part.start > now else ""


def _nodes_line(experiment: ExperimentConfig, job: RunJob, now: float) -> str:
    wanted = (experiment.nodes or NodesConfig()).counts
    if len(job.components) == 1:  # a smoke test, or a job that the supervisor splits
        (part,) = job.components
        total = part.num_nodes if part.name == "smoke" else sum(wanted.values())
        has = f"{part.num_nodes}/{_count(total, 'node')}"
    else:
        has = "   ".join(
            f"{part.name} {part.num_nodes}/{_count(wanted.get(part.name, part.num_nodes), 'node')}"
            for part in job.components
        )
    end = min((part.limit_end for part in job.components if part.limit_end is not None), default=None)
    return f"{has}   {'no time limit' if end is None else f'time left {duration(max(0.0, end - now))}'}"


def _nodes_of_attempt(run: RunDirectory, job: RunJob) -> tuple[str, ...]:
    """Of the one that goes on; none while it has not begun."""
    rows = AttemptBook(run).rows()
    return rows[-1].nodes if rows and rows[-1].job == job.id and not rows[-1].outcome else ()


def _cost_line(run: RunDirectory, experiment: ExperimentConfig) -> str:
    used = AttemptBook(run).node_hours()
    most = experiment.nodes.max_node_hours if experiment.nodes else None
    if most is not None:
        return f"cost    {used:.2f} of {most:g} node-hours"
    return f"cost    {used:.2f} node-hours" if used else ""


def _redone_s(run: RunDirectory, rows: list[AttemptRow]) -> float:
    """Time of the steps that an attempt trained again, because no checkpoint had them."""
    cut = (row for attempt in rows for row in read_jsonl(run.logs(attempt.number) / "superseded.jsonl"))
    return sum(row.get("seconds/step") or 0.0 for row in cut)


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
