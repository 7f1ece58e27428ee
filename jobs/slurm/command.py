"""Run one command of Slurm: within a time, and with an error that says what to do. Imports no torch."""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from towline.storage.errors import SlurmError

_DISPLAY_SETTINGS = ("SQUEUE_", "SACCT_", "SINFO_", "SCONTROL_")
_WHAT_TO_DO = (
    ("Unable to contact slurm controller", "look at `scontrol ping`, and whether SLURM_CONF names the right file"),
    ("Connection refused", "look at `scontrol ping`, and whether SLURM_CONF names the right file"),
    ("Could not establish a configuration source", "set SLURM_CONF, or run this on a node of the cluster"),
    ("Socket timed out", "the controller is busy: before trying again, see with `squeue --me` what it has taken"),
    ("Invalid job id", "the job has ended and is forgotten, or it is another cluster's: look at `sacct -j ID`"),
    ("Job/step already completing or completed", "nothing is left to do: the job has ended"),
    ("invalid partition specified", "`sinfo -s` lists the partitions"),
    ("Invalid node name", "`sinfo -N` lists the nodes; two components of one job must not name the same in nodelist"),
    ("Invalid account", "`sacctmgr show associations user=$USER` lists accounts and partitions that go together"),
    ("Invalid qos", "`sacctmgr show associations user=$USER format=account,qos` lists them"),
    ("Invalid wckey", "leave the option wckey out, or ask for a key: `sacctmgr show wckey`"),
    ("Requested node configuration is not available", "compare the options with `sinfo -N -o '%N %P %c %m %G'`"),
    ("Requested time limit is invalid", "`sinfo -o '%P %l'` lists the limits of the partitions"),
    ("accounting_storage", "this cluster keeps no accounting: squeue knows only recent jobs"),
    ("Slurm accounting storage is disabled", "this cluster keeps no accounting: squeue knows only recent jobs"),
)


def slurm(command: Sequence[str], *, timeout_s: float = 60, environment: Mapping[str, str] | None = None) -> str:
    """Return what `command`, such as ["squeue", "--me"], printed.

    Args:
        environment: ours, unless given. The user's display settings (SQUEUE_PARTITION, ...) never reach the command:
            they would hide jobs or change columns.

    Raises:
        SlurmError: the command is not there, failed, or took longer than `timeout_s`; its text is in the message.
    """
    shown = shlex.join(command)
    given = os.environ if environment is None else environment
    clean = {name: value for name, value in given.items() if not name.startswith(_DISPLAY_SETTINGS)}
    try:
        done = subprocess.run(
            command, env=clean, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except (FileNotFoundError, PermissionError) as error:
        raise SlurmError(
            f"`{shown}` cannot be run: {command[0]} is not on PATH here. Expected a node with Slurm's commands; "
            "inside a container, mount them or run this outside."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"`{shown}` did not answer within {timeout_s:g} s, and what it asked for may still have been done. "
            "See with `squeue --me` before trying again."
        ) from error
    if done.returncode != 0:
        raise SlurmError(failure(shown, done.returncode, _text(done.stderr) or _text(done.stdout)))
    return done.stdout.decode(errors="replace")


def failure(shown: str, status: int, said: str) -> str:
    """What failed, what it said, and what to do."""
    advice = next((todo for sign, todo in _WHAT_TO_DO if sign.lower() in said.lower()), None)
    ending = f"\nWhat to do: {advice}." if advice else ""
    return f"`{shown}` ended with {status}: {said or 'it said nothing'}{ending}"


def _text(output: bytes) -> str:
    return output.decode(errors="replace").strip()
