"""An experiment as a cluster's profile places it: ranks and engines, sbatch's options, and what is wrong with them."""

import os
from dataclasses import dataclass
from pathlib import Path

from towline.jobs.experiment import ExperimentConfig, RolloutExperiment
from towline.jobs.experiment_parts import LocalConfig, NodesConfig, TrainerNodesConfig
from towline.jobs.slurm.placement import GROUPS, group_of
from towline.jobs.slurm.profile import ClusterProfile, Option
from towline.launcher.experiment_file import ExperimentFile, read_experiment
from towline.launcher.findings import Findings
from towline.launcher.het_script import check_components, check_folder
from towline.launcher.job_plan import job_plan_lines
from towline.launcher.partition import partition_problems
from towline.launcher.preflight import preflight
from towline.launcher.profile_file import load_profile
from towline.storage.errors import InputError, SlurmError


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCluster:
    profile: ClusterProfile
    file: ExperimentFile
    experiment: ExperimentConfig
    components: dict[str, dict[str, Option]]
    is_smoke: bool

    def look(self) -> Findings:
        """Everything that can be known before the queue."""
        found = preflight(self.file, self.experiment, for_cluster=self.profile.name)
        # The run's folder is called after the file, unless the experiment names it.
        found.attempt(lambda: check_folder(self.experiment.run.root / self.file.path.stem))
        try:
            found.problems += partition_problems(self.profile, self.components)
        except SlurmError as error:
            found.warnings.append(f"the limits of the partitions are not known: {error}")
        return found

    def job_lines(self) -> list[str]:
        return list(job_plan_lines(self.profile, self.experiment, self.components, smoke=self.is_smoke))


def read_on_cluster(
    path: Path, cluster: str | None, overrides: tuple[str, ...] = (), *, smoke: bool = False
) -> OnCluster:
    """
    Raises:
        InputError: profile or experiment cannot be read, or sbatch would not take the profile's options.
    """
    profile = load_profile(cluster)
    file, experiment = read_experiment(path, overrides, profile.vars, Path(_expanded(profile.folders.runs)))
    experiment = placed(experiment, profile, smoke=smoke)
    components = components_of(profile, experiment, smoke=smoke)
    try:
        check_components(components)
    except InputError as error:
        raise InputError(f"profile {profile.name}: {error}") from error
    return OnCluster(profile=profile, file=file, experiment=experiment, components=components, is_smoke=smoke)


def placed(experiment: ExperimentConfig, profile: ClusterProfile, *, smoke: bool) -> ExperimentConfig:
    """The experiment with the numbers of ranks, engines and scorers that the cluster's nodes give it."""
    per_node = {name: 1 if smoke else group_of(profile, name).processes_per_node for name in GROUPS}
    threads = {name: (profile.smoke if smoke else group_of(profile, name)).cpus_per_process for name in GROUPS}
    kind = NodesConfig if isinstance(experiment, RolloutExperiment) else TrainerNodesConfig
    nodes = experiment.nodes or kind()
    if smoke:
        nodes = kind(max_node_hours=nodes.max_node_hours)
    local = experiment.local
    counts = {
        "trainer_ranks": nodes.trainer * per_node["trainer"],
        "trainer_threads": 1 if experiment.deterministic else threads["trainer"] or local.trainer_threads,
    }
    if isinstance(local, LocalConfig):
        counts |= {
            "engines": nodes.counts["rollout"] * per_node["rollout"],
            "engine_threads": 1 if experiment.deterministic else threads["rollout"] or local.engine_threads,
            "scorers": (threads["scorer"] or local.scorers) if nodes.counts["scorer"] else local.scorers,
        }
    return experiment.model_copy(update={"nodes": nodes, "local": local.model_copy(update=counts)})


def components_of(
    profile: ClusterProfile, experiment: ExperimentConfig, *, smoke: bool, exclude: tuple[str, ...] = ()
) -> dict[str, dict[str, Option]]:
    """sbatch's options, component by component; the first is the leader.

    Args:
        exclude: nodes, beside those that the profile excludes.
    """
    counts = (experiment.nodes or TrainerNodesConfig()).counts
    groups = {name: group_of(profile, name) for name in GROUPS if counts[name]}
    # Slurm takes a component away with its lost node unless the leader, too, asks it not to.
    survives = {"no-kill": True} if profile.on_node_loss == "continue" else {}
    if smoke:
        components = {"smoke": {"nodes": 1, "ntasks-per-node": 1, **profile.smoke.sbatch}}
    elif profile.is_single:
        total = {"nodes": sum(counts.values()), "ntasks-per-node": groups["trainer"].processes_per_node}
        components = {"trainer": {**total, **survives, **profile.trainer.sbatch}}
    else:
        components = {
            name: {"nodes": counts[name], "ntasks-per-node": group.processes_per_node, **survives, **group.sbatch}
            for name, group in groups.items()
        }
    return {name: _excluding(options, exclude) for name, options in components.items()}


def _excluding(options: dict[str, Option], nodes: tuple[str, ...]) -> dict[str, Option]:
    if not nodes:
        return options
    before = [str(options["exclude"])] if options.get("exclude") else []
    return options | {"exclude": ",".join([*before, *nodes])}


def _expanded(folder: str) -> str:
    expanded = os.path.expanduser(os.path.expandvars(folder))
    if "$" in expanded:
        raise InputError(f'folders.runs = "{folder}" of the profile: {expanded} names a variable that is not set here.')
    return expanded
