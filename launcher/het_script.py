"""The text that sbatch gets for one heterogeneous job.

Options are sbatch's own long names. What concerns the job as a whole (its name, log, signals, requeue, dependencies)
is the first component's, the leader's: Slurm ignores or refuses it on the others.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from towline.jobs.slurm.text import time_limit_s
from towline.storage.errors import InputError, SlurmError

Option = str | int | bool
Options = Mapping[str, Option]

OF_THE_JOB = frozenset(
    {
        *(
            "output",
            "error",
            "input",
            "open-mode",
            "job-name",
            "requeue",
            "no-requeue",
            "signal",
            "dependency",
            "wckey",
        ),
        *("begin", "deadline", "hold", "mail-type", "mail-user", "comment", "export", "chdir", "kill-on-invalid-dep"),
    }
)
_OF_THE_SUBMISSION = frozenset({"array", "wrap", "parsable", "wait", "test-only", "help", "usage", "version"})
_NAME = re.compile(r"[a-z][a-z0-9-]+")


def job_defaults(folder: Path) -> dict[str, Option]:
    """Options of the leader unless given. `B:` signals the batch step, which the callable runs in."""
    return {
        "job-name": "towline",
        "output": f"{folder}/%j_0_log.out",
        "error": f"{folder}/%j_0_log.err",
        "open-mode": "append",
        "signal": "B:USR2@90",
        "requeue": True,
    }


def check_components(components: Mapping[str, Options]) -> None:
    """
    Raises:
        InputError: names the component and the option.
    """
    if not components:
        raise InputError("a job needs a component: found none, expected at least {'name': {'partition': ...}}")
    for number, (component, options) in enumerate(components.items()):
        for name in options:
            where = f"option {name!r} of component {component!r}"
            if not _NAME.fullmatch(name):
                raise InputError(f"{where}: expected a long name of sbatch without dashes in front, such as 'nodes'")
            if name == "array":
                raise InputError(f"{where}: Slurm refuses arrays of heterogeneous jobs. Submit the jobs one by one.")
            if name in _OF_THE_SUBMISSION:
                raise InputError(f"{where}: it is for the command line of sbatch, not for a job. Leave it out.")
            if number and name in OF_THE_JOB:
                leader = next(iter(components))
                raise InputError(f"{where} is for the whole job: give it to the first component, {leader!r}")
        if "time" in options:
            try:
                time_limit_s(options["time"])
            except SlurmError as error:
                raise InputError(f"option 'time' of component {component!r}: {error}") from error


def check_folder(folder: Path) -> None:
    """sbatch replaces `%j` and the like in log paths, and a backslash there changes the meaning of the rest.

    Raises:
        InputError: the folder's path has such a character.
    """
    if found := re.search(r"[%\\\x00-\x1f]", str(folder)):
        raise InputError(
            f"the folder {str(folder)!r} cannot hold a Slurm job: {found[0]!r} has a meaning of its own in the log "
            "paths of sbatch. Expected a path without %, backslash and control characters; spaces and quotes are fine."
        )


def num_tasks(options: Options, component: str) -> int:
    """Ranks of a component's step: `ntasks`, or one or `ntasks-per-node` on each of `nodes`.

    Raises:
        InputError: a range of nodes, which Slurm decides on.
    """
    if "ntasks" in options:
        return int(options["ntasks"])
    try:
        return int(options.get("nodes", 1)) * int(options.get("ntasks-per-node", 1))
    except ValueError as error:
        raise InputError(
            f"component {component!r}: the number of ranks is not known from nodes={options.get('nodes')!r} and "
            f"ntasks-per-node={options.get('ntasks-per-node')!r}. Give 'ntasks'."
        ) from error


def script_text(components: Mapping[str, Options], *, folder: Path, setup: Sequence[str], command: str) -> str:
    """
    Args:
        setup: shell lines before the command, such as `module load`.
        command: shell words; they take the place of the shell, so that signals for the batch step reach them.
    """
    leader, *others = components.values()
    lines = ["#!/bin/bash", *_directives(job_defaults(folder) | dict(leader))]
    for options in others:
        lines += ["#SBATCH hetjob", *_directives(options)]
    return "\n".join([*lines, "", *setup, f"exec {command}", ""])


def _directives(options: Options) -> list[str]:
    return [_directive(name, value) for name, value in options.items() if value is not False]


def _directive(name: str, value: Option) -> str:
    return f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={sbatch_quote(str(value))}"


def sbatch_quote(text: str) -> str:
    """For a #SBATCH line, where, unlike in a shell, a backslash counts inside any quotes and # starts a comment."""
    if "\n" in text:
        raise InputError(f"{text!r} cannot be an option of sbatch: expected one line")
    if text and shlex.quote(text) == text:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
