"""Layout, cost and limit of a job, as `submit` and `check` say it."""

from pathlib import Path

import pytest

from towline.jobs.slurm.profile import ClusterProfile, Group
from towline.launcher.job_plan import job_plan_lines
from towline.launcher.on_cluster import components_of, placed

DAY = Group(sbatch={"time": "24:00:00"})
HALF = Group(sbatch={"time": "12:00:00"})


def lines(
    project, *overrides: str, smoke: bool = False, trainer: Group = DAY, rollout: Group = DAY, **fields: object
) -> list[str]:
    profile = ClusterProfile.model_validate({"name": "x", "trainer": trainer, "rollout": rollout,
                                             "smoke": Group(sbatch={"time": 15}), **fields})  # fmt: skip
    experiment = placed(project.read(*overrides)[1], profile, smoke=smoke)
    return list(job_plan_lines(profile, experiment, components_of(profile, experiment, smoke=smoke), smoke=smoke))


def test_a_heterogeneous_job_is_told_by_its_groups(project) -> None:
    assert lines(project, "nodes.trainer=2", "nodes.rollout=4", "nodes.max_node_hours=300") == [
        "layout  heterogeneous job: trainer 2 nodes + rollout 4 nodes",
        "cost    up to 144.0 node-hours an attempt, 300 in all; then it stops",
        "limit   24 h: a checkpoint in time, then requeue",
    ]


def test_scorer_nodes_are_counted(project) -> None:
    layout, cost, _ = lines(project, "nodes.scorer=1", scorer=DAY)
    assert layout == "layout  heterogeneous job: trainer 1 node + rollout 1 node + scorer 1 node"
    assert cost == "cost    up to 72.0 node-hours an attempt, no nodes.max_node_hours"


def test_one_job_is_split(project) -> None:
    layout, cost, _ = lines(project, "nodes.rollout=3", layout="single")
    assert layout == "layout  one job of 4 nodes, split by the supervisor: trainer 1 node + rollout 3 nodes"
    assert cost.startswith("cost    up to 96.0 node-hours")


def test_a_smoke_test_takes_one_node(project) -> None:
    assert lines(project, "nodes.rollout=3", smoke=True) == [
        "layout  smoke test: trainer and rollout on one node",
        "cost    up to 0.2 node-hours an attempt, no nodes.max_node_hours",
        "limit   15 min: a checkpoint in time, then requeue",
    ]


def test_the_shortest_limit_ends_the_attempt(project) -> None:
    _, cost, limit = lines(project, rollout=HALF)
    assert cost.startswith("cost    up to 24.0 node-hours")
    assert limit.startswith("limit   12 h:")


@pytest.mark.parametrize("group", [Group(), Group(sbatch={"time": "UNLIMITED"})])
def test_without_a_limit_the_partition_has_one(project, group: Group) -> None:
    _, cost, limit = lines(project, trainer=group, rollout=group)
    assert cost == "cost    no time limit of its own, no nodes.max_node_hours"
    assert limit.startswith("limit   of the partition:")


@pytest.mark.parametrize(
    ("mode", "afterwards"),
    [("requeue", "then requeue"), ("resubmit", "then a successor"), ("off", 'then the end (continue = "off")')],
)
def test_what_follows_the_limit_is_said(project, mode: str, afterwards: str) -> None:
    assert afterwards in lines(project, **{"continue": mode})[2]


def test_the_experiments_file_is_not_changed(project) -> None:
    before = Path(project.file).read_text()
    lines(project)
    assert Path(project.file).read_text() == before
