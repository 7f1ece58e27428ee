"""In which state the components of jobs are, asked of sacct where it works and else of squeue.

sacct forgets nothing, but lags behind by seconds and exits 1 on a cluster without accounting. squeue knows at once, but
forgets a job some minutes after its end (MinJobAge). Together they always have an answer: `GONE` if both have none.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from towline.jobs.slurm.command import slurm
from towline.jobs.slurm.text import first_word, is_success, is_terminal, parse_job_id
from towline.storage.errors import SlurmError

GONE = "GONE"
"""Of a job that neither command knows, any more or at all. Not a word of Slurm's."""
_SACCT = ["sacct", "--noheader", "--parsable2", "--format=JobID,State,ExitCode,NodeList"]
_SQUEUE = ["squeue", "--noheader", "--all", "--states=all", "--format=%i|%T||%N"]


@dataclass(frozen=True, slots=True)
class ComponentState:
    state: str
    """One word of Slurm's, or GONE."""
    exit_code: str = ""
    """code:signal, such as 1:0 or 0:9; empty if not known."""
    nodes: str = ""


States = dict[int, ComponentState]
"""By component; an ordinary job has component 0."""


class StatesUnknown(SlurmError):
    """Neither command could be asked."""


def job_states(jobs: Collection[str]) -> dict[str, States]:
    """States of the jobs (`12`), GONE for one that neither command knows; one that cannot be told now is left out.

    Raises:
        StatesUnknown: neither answers, because the controller is away, say.
    """
    try:
        known, sacct_error = read_states(_ask(_SACCT, jobs), jobs), None
    except SlurmError as error:
        known, sacct_error = {}, error
    doubtful = [job for job in jobs if job not in known or any(_may_come_back(row) for row in known[job].values())]
    if not doubtful:
        return known
    try:
        newer = read_states(_ask(_SQUEUE, doubtful), doubtful)
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            if sacct_error is not None:
                raise StatesUnknown(f"{sacct_error}\n{error}") from error
            return known
        newer = {}
    both = known | {job: _merge(known.get(job, {}), states) for job, states in newer.items()}
    return {job: {0: ComponentState(GONE)} for job in jobs} | both


def read_states(text: str, jobs: Collection[str]) -> dict[str, States]:
    """Rows `JobID|State|ExitCode|NodeList` of sacct or squeue; steps and other jobs are skipped."""
    found: dict[str, States] = {}
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) != 4 or re.split(r"\D", fields[0])[0] not in jobs:
            continue
        id = parse_job_id(fields[0])
        if id.step is None and fields[1]:
            state = ComponentState(first_word(fields[1]), *fields[2:])
            found.setdefault(id.job, {})[id.component or 0] = state
    return found


def overall(states: Sequence[str]) -> str:
    """One word for a job of several components: how it failed, else that it waits, runs or is done.

    A component that did not succeed decides while others still run; if several ended differently, it is FAILED.
    """
    words = [first_word(state) for state in states]
    unsuccessful = {word for word in words if is_success(word) is False}
    if unsuccessful:
        return unsuccessful.pop() if len(unsuccessful) == 1 else "FAILED"
    for waiting in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"):
        if waiting in words:
            return waiting
    return next((word for word in words if not is_terminal(word)), words[0])


def exit_code(job_id: str) -> str:
    """Of a component (`12+1`) or job that the controller still knows, code:signal; empty if it knows none."""
    try:
        found = re.search(r"\bExitCode=(\d+:\d+)", slurm(["scontrol", "show", "job", "--oneliner", job_id]))
    except SlurmError:
        return ""
    return found[1] if found else ""


def all_ended(states: Collection[str]) -> bool:
    return all(is_terminal(state) or state == GONE for state in states)


def _may_come_back(row: ComponentState) -> bool:
    """A job that is requeued is pending again in squeue before sacct has it."""
    return is_success(row.state) is False or row.state == "REQUEUED"


def _merge(accounted: Mapping[int, ComponentState], queued: Mapping[int, ComponentState]) -> States:
    """squeue is right about what is alive; about what has ended, sacct knows the exit code."""
    merged = dict(accounted)
    for component, row in queued.items():
        if component not in merged or not is_terminal(row.state):
            merged[component] = row
    return merged


def _ask(command: Sequence[str], jobs: Collection[str]) -> str:
    return slurm([*command, f"--jobs={','.join(sorted(jobs))}"])
