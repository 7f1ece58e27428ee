"""What the batch step asks Slurm about its own job, and what it has Slurm do with it. Imports no torch."""

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from towline.jobs.slurm.command import slurm
from towline.jobs.slurm.text import expand_nodes, outside_a_job, submitted_job_id
from towline.storage.errors import SlurmError

_LOST = ("DOWN", "FAIL", "NOT_RESPONDING", "UNKNOWN", "*")


def time_limit_end(job: str) -> float | None:
    """When the limit ends the job, s since the epoch; None without a limit.

    Raises:
        SlurmError: the controller does not answer.
    """
    said = slurm(["squeue", "--noheader", f"--job={job}", "--format=%e"], timeout_s=20).split()
    try:
        # Of a het job there is a line a component; the first limit ends them all.
        return min(datetime.fromisoformat(end).timestamp() for end in said)
    except ValueError:  # "N/A": none
        return None


def lost_nodes(nodes: Sequence[str]) -> tuple[str, ...]:
    """Those that Slurm has given up, or does not hear from."""
    said = slurm(["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T"], timeout_s=20)
    states = dict(line.split("|", 1) for line in said.splitlines())
    return tuple(node for node in nodes if any(word in states.get(node, "unknown").upper() for word in _LOST))


def nodes_that_failed(nodes: Sequence[str], since: float) -> tuple[str, ...]:
    """Those of an earlier attempt that went down after it began: as accounting has it, else those down now."""
    start = datetime.fromtimestamp(since).isoformat(timespec="seconds")
    command = ["sacctmgr", "--noheader", "--parsable2", "show", "event", f"nodes={','.join(nodes)}", f"start={start}",
               "format=NodeName,State"]  # fmt: skip
    try:
        lines = slurm(command, timeout_s=20).splitlines()
    except SlurmError:
        return lost_nodes(nodes)
    down = {name for name, _, state in (line.partition("|") for line in lines) if state.upper().startswith("DOWN")}
    return tuple(node for node in nodes if node in down)


def submit_successor(script: Path, after: str) -> str:
    """Hand in the same script again, to start when job `after` has ended, however it ends; return its id."""
    command = ["sbatch", "--parsable", f"--dependency=afterany:{after}", str(script)]
    return submitted_job_id(slurm(command, environment=outside_a_job(os.environ)))


def cancel(job: str) -> None:
    slurm(["scancel", job])


def is_being_taken(job: str) -> bool:
    """Whether Slurm is ending the job: cancelled, preempted, requeued, or out of time."""
    said = slurm(["squeue", "--noheader", "--states=all", f"--job={job}", "--format=%T"], timeout_s=20).split()
    return not said or any(state != "RUNNING" for state in said)


def hosts_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Every node of the job, component after component."""
    if "SLURM_HET_SIZE" not in environment:
        return expand_nodes(environment["SLURM_JOB_NODELIST"])
    lists = [f"SLURM_JOB_NODELIST_HET_GROUP_{number}" for number in range(int(environment["SLURM_HET_SIZE"]))]
    return tuple(node for name in lists for node in expand_nodes(environment[name]))


def exclude_nodes(job: str, nodes: Sequence[str]) -> None:
    """Of a job that waits to start: give none of its components such a node, nor one that it excludes already."""
    # %A numbers components as Slurm's own commands do: 12, 13.
    said = slurm(["squeue", "--noheader", "--states=all", f"--job={job}", "--format=%A|%x"], timeout_s=20)
    for line in said.split():
        component, _, before = line.partition("|")
        excluded = dict.fromkeys([*expand_nodes(before), *nodes])
        slurm(["scontrol", "update", f"JobId={component}", f"ExcNodeList={','.join(excluded)}"])
