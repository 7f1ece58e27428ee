"""Layout, cost and limit of a job, in words."""

from collections.abc import Iterator, Mapping

from towline.jobs.experiment import ExperimentConfig
from towline.jobs.slurm.profile import ClusterProfile, Option
from towline.jobs.slurm.text import time_limit_s
from towline.launcher.summary import duration

_AFTERWARDS = {
    "requeue": "a checkpoint in time, then requeue",
    "resubmit": "a checkpoint in time, then a successor that waits in the queue already",
    "off": 'a checkpoint in time, then the end (continue = "off")',
}


def job_plan_lines(
    profile: ClusterProfile,
    experiment: ExperimentConfig,
    components: Mapping[str, Mapping[str, Option]],
    *,
    smoke: bool,
) -> Iterator[str]:
    nodes = experiment.nodes
    assert nodes is not None
    parts = nodes.counts
    groups = " + ".join(f"{name} {_count(number, 'node')}" for name, number in parts.items() if number)
    if smoke:
        yield f"layout  smoke test: {' and '.join(name for name, number in parts.items() if number)} on one node"
    elif len(components) > 1:
        yield f"layout  heterogeneous job: {groups}"
    else:
        split = f", split by the supervisor: {groups}" if " + " in groups else ""
        yield f"layout  one job of {_count(sum(parts.values()), 'node')}{split}"
    total = 1 if smoke else sum(parts.values())
    limits = [time_limit_s(str(options["time"])) for options in components.values() if "time" in options]
    limit_s = min((limit for limit in limits if limit is not None), default=None)
    budget = f"{nodes.max_node_hours:g} in all; then it stops" if nodes.max_node_hours else "no nodes.max_node_hours"
    attempt = (
        "no time limit of its own" if limit_s is None else f"up to {total * limit_s / 3600:.1f} node-hours an attempt"
    )
    yield f"cost    {attempt}, {budget}"
    limit = "of the partition" if limit_s is None else duration(limit_s).removesuffix(" 00 min").removesuffix(" 00 s")
    yield f"limit   {limit}: {_AFTERWARDS[profile.continue_]}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"
