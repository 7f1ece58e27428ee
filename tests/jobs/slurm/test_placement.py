"""Which nodes each group gets, in every layout."""

import json
from typing import Any

import pytest

from towline.jobs.experiment_parts import NodesConfig
from towline.jobs.slurm.placement import Place, place_groups
from towline.jobs.slurm.profile import ClusterProfile
from towline.storage.errors import TowlineError

HET = {
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_NODELIST": "t[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "t[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "g[007-010]",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "c1",
}


def cluster(**fields: Any) -> ClusterProfile:
    gpus = {"sbatch": {"gpus-per-node": 4, "cpus-per-task": 8}, "srun": {"cpu-bind": "none"}}
    return ClusterProfile.model_validate_json(json.dumps({"name": "x", "trainer": gpus, "rollout": gpus, **fields}))


def test_a_het_job_has_a_node_list_for_each_group():
    groups = place_groups(cluster(), NodesConfig(trainer=2, rollout=4, scorer=1), HET)
    assert groups["trainer"] == Place(
        nodes=("t1", "t2"),
        per_node=4,
        het_group=0,
        gpus_per_process=1,
        cpus_per_process=8,
        options={"cpu-bind": "none"},
    )
    assert groups["rollout"].nodes == ("g007", "g008", "g009", "g010")
    assert groups["rollout"].het_group == 1
    assert (groups["scorer"].nodes, groups["scorer"].het_group, groups["scorer"].per_node) == (("c1",), 2, 1)


@pytest.mark.parametrize("environment", [HET | {"SLURM_HET_SIZE": "2"}, {"SLURM_JOB_NODELIST": "t[1-2],g[007-010]"}])
def test_a_scorer_on_each_rollout_node_takes_no_nodes_and_no_gpus(environment: dict[str, str]):
    wanted = NodesConfig(trainer=2, rollout=4, scorer="rollout")
    assert (wanted.counts, wanted.num_scorers) == ({"trainer": 2, "rollout": 4, "scorer": 0}, 4)
    groups = place_groups(cluster(), wanted, environment)
    rollout, scorer = groups["rollout"], groups["scorer"]
    assert scorer.nodes == rollout.nodes == ("g007", "g008", "g009", "g010")
    assert (scorer.het_group, scorer.per_node, scorer.cpus_per_process) == (rollout.het_group, 1, 8)
    assert [scorer.node_of(number) for number in range(4)] == list(rollout.nodes)
    assert scorer.gpus_of(0) is None


def test_a_single_job_is_split_in_the_order_of_its_nodes():
    groups = place_groups(cluster(), NodesConfig(trainer=1, rollout=2), {"SLURM_JOB_NODELIST": "n[8-10]"})
    assert groups["trainer"].nodes == ("n8",)
    assert groups["rollout"].nodes == ("n9", "n10")
    assert groups["trainer"].het_group is None


def test_a_job_with_other_nodes_than_were_asked_for_is_refused():
    with pytest.raises(TowlineError, match=r"the job has 3 nodes \(n8, n9, n10\), the experiment asks for \[2, 2\]"):
        place_groups(cluster(), NodesConfig(trainer=2, rollout=2), {"SLURM_JOB_NODELIST": "n[8-10]"})


def test_outside_a_job_it_is_said_where_this_belongs():
    with pytest.raises(TowlineError, match="SLURM_JOB_NODELIST is not set"):
        place_groups(cluster(), NodesConfig(), {})


def test_engines_and_their_gpus_fill_one_node_after_the_other():
    rollout = place_groups(cluster(), NodesConfig(trainer=2, rollout=4, scorer=1), HET)["rollout"]
    assert rollout.size == 16
    assert [rollout.node_of(number) for number in (0, 3, 4, 15)] == ["g007", "g007", "g008", "g010"]
    assert [rollout.gpus_of(number) for number in (0, 3, 4, 15)] == [(0, 1), (3, 1), (0, 1), (3, 1)]


def test_fewer_engines_than_gpus_take_several_each():
    half = {"sbatch": {"gpus-per-node": 4, "ntasks-per-node": 2}}
    rollout = place_groups(cluster(rollout=half), NodesConfig(trainer=2, rollout=4, scorer=1), HET)["rollout"]
    assert [rollout.gpus_of(number) for number in (0, 1, 2)] == [(0, 2), (2, 2), (0, 2)]


@pytest.mark.parametrize(("gpus", "rollout_gpus"), [(4, (1, 1)), (1, (0, 1)), (0, None)])
def test_a_smoke_test_shares_one_node(gpus: int, rollout_gpus: tuple[int, int] | None):
    smoke = {"sbatch": {"gpus-per-node": gpus}}
    groups = place_groups(cluster(smoke=smoke), NodesConfig(), {"SLURM_JOB_NODELIST": "d1"}, is_smoke=True)
    assert groups["trainer"].nodes == groups["rollout"].nodes == ("d1",)
    assert groups["rollout"].gpus_of(0) == rollout_gpus
    assert groups["trainer"].size == groups["rollout"].size == 1
