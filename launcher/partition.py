"""What a partition's limits say of a job before it waits in vain."""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence

from towline.jobs.slurm.command import slurm
from towline.jobs.slurm.profile import ClusterProfile, Option
from towline.jobs.slurm.text import time_limit_s
from towline.storage.errors import SlurmError

Components = Mapping[str, Mapping[str, Option]]
Fields = Mapping[str, str]
"""Of `scontrol show partition`."""


def partition_problems(profile: ClusterProfile, components: Components) -> list[str]:
    """What can never start; empty where Slurm's commands are missing, as on a workstation.

    Raises:
        SlurmError: Slurm does not answer.
    """
    return [*_problems(profile, components)] if shutil.which("scontrol") else []


def _problems(profile: ClusterProfile, components: Components) -> Iterator[str]:
    wanted = {component: _names(options) for component, options in components.items()}
    known = {name: partition(name) for name in sorted({name for names in wanted.values() for name in names})}
    for name, found in known.items():
        if found is None:
            yield f"partition {name} of profile {profile.name} does not exist here: `sinfo -s` lists those that do."
    found = {component: [fields for name in names if (fields := known[name])] for component, names in wanted.items()}
    for component, options in components.items():
        yield from _too_long(profile, component, options, found[component])
    yield from _too_many_jobs(profile, found)


def _names(options: Mapping[str, Option]) -> list[str]:
    """sbatch takes several, comma between, and uses the first that is free."""
    return [name for name in str(options.get("partition") or "").split(",") if name]


def partition(name: str) -> dict[str, str] | None:
    """Fields of `scontrol show partition`; None if there is no such partition."""
    try:
        text = slurm(["scontrol", "--oneliner", "show", "partition", name], timeout_s=20)
    except SlurmError as error:
        if "not found" in str(error):
            return None
        raise
    return dict(re.findall(r"(\w+)=(\S+)", text))


def _too_long(
    profile: ClusterProfile, component: str, options: Mapping[str, Option], partitions: Sequence[Fields]
) -> Iterator[str]:
    if "time" not in options or not partitions or any(_allows(found, options["time"]) for found in partitions):
        return
    names = " or ".join(found["PartitionName"] for found in partitions)
    limits = " or ".join(found["MaxTime"] for found in partitions)
    yield (
        f"{component}.sbatch.time = {options['time']} of profile {profile.name} is more than partition {names} allows "
        f"({limits})."
    )


def _allows(found: Fields, time: Option) -> bool:
    most, asked = time_limit_s(found.get("MaxTime", "UNLIMITED")), time_limit_s(str(time))
    return most is None or (asked is not None and asked <= most)


def _too_many_jobs(profile: ClusterProfile, partitions: Mapping[str, Sequence[Fields]]) -> Iterator[str]:
    """Each component of a heterogeneous job counts as a job of its partition's QoS."""
    jobs: dict[str, list[Fields]] = {}
    for found in partitions.values():
        if len(found) == 1:  # of several, Slurm takes one that has room
            jobs.setdefault(found[0].get("QoS", "N/A"), []).append(found[0])
    for qos, places in jobs.items():
        most = max_jobs_per_user(qos) if len(places) > 1 else None
        if most is not None and len(places) > most:
            names = " and ".join(dict.fromkeys(found["PartitionName"] for found in places))
            yield (
                f"partition {names} lets a user run {most} job{'' if most == 1 else 's'} at a time (QoS {qos}), and "
                f"{len(places)} components of a heterogeneous job count as {len(places)}: they wait for one another "
                f'for ever. Set layout = "single" in profile {profile.name}, or choose another partition.'
            )


def max_jobs_per_user(qos: str) -> int | None:
    """None without a limit, or without a database that knows it."""
    if qos in ("N/A", ""):
        return None
    try:
        said = slurm(["sacctmgr", "--noheader", "--parsable2", "show", "qos", qos, "format=MaxJobsPU"], timeout_s=20)
    except SlurmError:
        return None
    return int(said.strip()) if said.strip().isdecimal() else None
