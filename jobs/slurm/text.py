"""The language of Slurm's texts: job ids, states, time limits, node lists, and the environment of a job.

Formats from the manual pages of sbatch, squeue and sacct; imports no torch and asks nobody.
"""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from towline.storage.errors import SlurmError

SUCCESS = "COMPLETED"
TERMINAL = frozenset(
    {
        *("BOOT_FAIL", "CANCELLED", SUCCESS, "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
        *("PREEMPTED", "REVOKED", "TIMEOUT"),
    }
)
_JOB_ID = re.compile(r"(\d+)(?:_(?:(\d+)|\[([\d,:-]+)(?:%\d+)?\])|\+(\d+))?(?:\.(\w[\w+]*))?")
_NODE_NAMES = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<clock>\d+(?::\d+){0,2})")
_UNLIMITED = frozenset({"UNLIMITED", "INFINITE", "-1"})

_OF_A_JOB = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "PMI", "OMPI_", "MASTER_")
_OF_A_RANK = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})
_OF_THE_SITE = frozenset({"SLURM_CONF"})


@dataclass(frozen=True, slots=True)
class JobId:
    """`12`, `12_3` (of an array), `12_[0-3%2]` (the pending part of one), `12+1` (component), `12+1.batch` (a step)."""

    job: str
    """Of a heterogeneous job: its leader's."""
    array: int | tuple[int, ...] | None = None
    component: int | None = None
    step: str | None = None


def parse_job_id(text: str) -> JobId:
    """Raises SlurmError for what is no job id."""
    found = _JOB_ID.fullmatch(text.strip())
    if found is None:
        raise SlurmError(f"{text!r} is not a job id of Slurm: expected one like 12, 12_3, 12_[0-3%2], 12+1 or 12.batch")
    job, index, indices, component, step = found.groups()
    array = int(index) if index else tuple(map(int, _expand(indices))) if indices else None
    return JobId(job=job, array=array, component=None if component is None else int(component), step=step)


def submitted_job_id(sbatch_stdout: str) -> str:
    """The id in what `sbatch` or `sbatch --parsable` printed, among the messages that a site may add.

    Raises:
        SlurmError: there is none.
    """
    found = re.search(r"^Submitted batch job (\d+)", sbatch_stdout, re.M)
    found = found or re.search(r"^(\d+)(?:;\S+)?\s*$", sbatch_stdout, re.M)
    if found is None:
        raise SlurmError(f"sbatch named no job: expected 'Submitted batch job ID', found {sbatch_stdout.strip()!r}")
    return found[1]


def first_word(state: str) -> str:
    """`CANCELLED` of `CANCELLED by 1000`, and of `CANCELLED+`, which is what sacct cuts to ten characters."""
    word = state.strip().partition(" ")[0].upper()
    if not word.endswith("+"):
        return word
    return next((whole for whole in sorted(TERMINAL) if whole.startswith(word[:-1])), word[:-1])


def is_terminal(state: str, *, requeued: bool = False) -> bool:
    """Whether a job in this state stays in it.

    Args:
        requeued: a preempted job waits for its next start instead.
    """
    word = first_word(state)
    return word in TERMINAL and not (requeued and word == "PREEMPTED")


def is_success(state: str) -> bool | None:
    """None while it is not known: the job has not ended."""
    return first_word(state) == SUCCESS if is_terminal(state) else None


def time_limit_s(text: str | int) -> int | None:
    """Seconds of `--time`: minutes, m:s, h:m:s, days-h, days-h:m or days-h:m:s; None for no limit, which 0 also asks.

    Raises:
        SlurmError: none of these.
    """
    text = str(text).strip()
    if text.upper() in _UNLIMITED:
        return None
    found = _TIME.fullmatch(text)
    if found is None:
        raise SlurmError(
            f"{text!r} is not a time limit of Slurm: expected minutes, minutes:seconds, hours:minutes:seconds, "
            "days-hours, days-hours:minutes, days-hours:minutes:seconds or UNLIMITED"
        )
    numbers = [int(number) for number in found["clock"].split(":")]
    if found["days"]:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
        return (int(found["days"]) * 24 + hours) * 3600 + minutes * 60 + seconds
    if len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return hours * 3600 + minutes * 60 + seconds or None


def expand_nodes(text: str) -> tuple[str, ...]:
    """Names of a node list like `n[001-003,007],gpu-a[1-2]`, in its order, zeros kept; none of `(null)` or `None`.

    Raises:
        SlurmError: brackets that do not fit.
    """
    text = text.strip()
    if text in ("", "(null)", "None", "None assigned"):
        return ()
    groups = _NODE_NAMES.findall(text)
    if ",".join(groups) != text:
        raise SlurmError(f"{text!r} is not a node list of Slurm: expected one like n[001-003,007],gpu-a[1-2]")
    return tuple(itertools.chain.from_iterable(map(_expand_group, groups)))


def outside_a_job(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` for a new submission, without what the job or the launcher around us has set.

    Inherited memory and binding options make Slurm refuse the new job or pin it to our cores. Where the configuration
    is stays.
    """
    return {
        name: value
        for name, value in environment.items()
        if name in _OF_THE_SITE or not (name.startswith(_OF_A_JOB) or name in _OF_A_RANK)
    }


def _expand_group(group: str) -> Iterator[str]:
    """`r[0-1]n[1,3]`: r0n1, r0n3, r1n1, r1n3."""
    pieces = re.split(r"\[([^\]]*)\]", group)
    choices = [list(_expand(piece)) if number % 2 else [piece] for number, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _expand(ranges: str) -> Iterator[str]:
    """`001-003,7` or `0-6:2`: each number as text, as wide as the first of its range."""
    for part in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if found is None:
            raise SlurmError(f"{part!r} is not a range of numbers: expected one like 7, 001-003 or 0-6:2")
        first, last, step = found[1], found[2] or found[1], found[3] or "1"
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1, int(step)))
