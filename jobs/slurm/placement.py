"""Which nodes of an allocation each kind of process gets: a het job has a node list a group, a single job is split."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from towline.jobs.experiment_parts import NodesConfig, TrainerNodesConfig
from towline.jobs.slurm.profile import ClusterProfile, Group, Options
from towline.jobs.slurm.text import expand_nodes
from towline.storage.errors import TowlineError

GROUPS = ("trainer", "rollout", "scorer")
"""In the order of a het job's components; the first is its leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the processes of one kind run."""

    nodes: tuple[str, ...]
    per_node: int
    """Processes of a node."""
    het_group: int | None = None
    """Component of the het job; None in a job that has one."""
    first_gpu: int = 0
    """Of the node's GPUs as Slurm shows them: those before it belong to another group."""
    gpus_per_process: int = 0
    cpus_per_process: int | None = None
    options: Options
    """Of the profile, for srun."""

    @property
    def size(self) -> int:
        return len(self.nodes) * self.per_node

    def node_of(self, number: int) -> str:
        """Where process `number` of the group runs; neighbours share a node."""
        return self.nodes[number // self.per_node]

    def gpus_of(self, number: int) -> tuple[int, int] | None:
        """First GPU and how many, of a process that is alone in its step; None without GPUs."""
        if not self.gpus_per_process:
            return None
        return self.first_gpu + number % self.per_node * self.gpus_per_process, self.gpus_per_process


def place_groups(
    profile: ClusterProfile, wanted: TrainerNodesConfig, environment: Mapping[str, str], *, is_smoke: bool = False
) -> dict[str, Place]:
    """Read the allocation that the batch script runs in.

    Raises:
        TowlineError: the allocation has not the nodes that were asked for.
    """
    counts = wanted.counts
    if is_smoke:
        return _share_one_node(profile, _hosts(environment, "SLURM_JOB_NODELIST"))
    groups = {name: group_of(profile, name) for name in GROUPS if counts[name]}
    if "SLURM_HET_SIZE" in environment:
        nodes = [_hosts(environment, f"SLURM_JOB_NODELIST_HET_GROUP_{number}") for number in range(len(groups))]
    else:
        nodes = _split(_hosts(environment, "SLURM_JOB_NODELIST"), [counts[name] for name in groups])
    is_het = "SLURM_HET_SIZE" in environment
    places = {
        name: _place(group, hosts, het_group=number if is_het else None)
        for number, ((name, group), hosts) in enumerate(zip(groups.items(), nodes, strict=True))
    }
    if isinstance(wanted, NodesConfig) and wanted.scorer == "rollout":
        places["scorer"] = _beside_engines(places["rollout"])
    return places


def _beside_engines(rollout: Place) -> Place:
    """One scorer on each rollout node, with the processors of an engine and none of the GPUs."""
    return replace(rollout, per_node=1, gpus_per_process=0)


def group_of(profile: ClusterProfile, name: str) -> Group:
    return {"trainer": profile.trainer, "rollout": profile.rollout, "scorer": profile.scorer}[name]


def _place(group: Group, nodes: tuple[str, ...], *, het_group: int | None) -> Place:
    per_node = group.processes_per_node
    return Place(
        nodes=nodes,
        per_node=per_node,
        het_group=het_group,
        gpus_per_process=group.gpus_per_node // per_node,
        cpus_per_process=group.cpus_per_process,
        options=group.srun,
    )


def _share_one_node(profile: ClusterProfile, nodes: tuple[str, ...]) -> dict[str, Place]:
    """One process of each kind. With one GPU they share it, as on a workstation."""
    gpus = profile.smoke.gpus_per_node
    trainer = Place(nodes=nodes[:1], per_node=1, gpus_per_process=min(gpus, 1), options=profile.smoke.srun,
                    cpus_per_process=profile.smoke.cpus_per_process)  # fmt: skip
    rollout = Place(nodes=nodes[:1], per_node=1, gpus_per_process=min(gpus, 1), first_gpu=1 if gpus > 1 else 0,
                    cpus_per_process=profile.smoke.cpus_per_process, options=profile.smoke.srun)  # fmt: skip
    return {"trainer": trainer, "rollout": rollout}


def _hosts(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    if name not in environment:
        raise TowlineError(f"{name} is not set: this runs in the batch step of a job that `towline submit` wrote.")
    return expand_nodes(environment[name])


def _split(nodes: tuple[str, ...], counts: list[int]) -> list[tuple[str, ...]]:
    if len(nodes) != sum(counts):
        raise TowlineError(f"the job has {len(nodes)} nodes ({', '.join(nodes)}), the experiment asks for {counts}.")
    starts = [sum(counts[:number]) for number in range(len(counts))]
    return [nodes[start : start + count] for start, count in zip(starts, counts, strict=True)]
