"""What a profile may say, and what follows from it."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from towline.jobs.slurm.profile import ClusterProfile, Group


def read(**fields: Any) -> ClusterProfile:
    return ClusterProfile.model_validate_json(json.dumps({"name": "x", **fields}))


@pytest.mark.parametrize(
    ("options", "gpus", "processes"),
    [
        ({}, 0, 1),
        ({"gpus-per-node": 4}, 4, 4),
        ({"gpus-per-node": "h100:8"}, 8, 8),
        ({"gres": "gpu:a100:2(S:0-1),nvme:1"}, 2, 2),
        ({"gres": "craynetwork:1,gpu"}, 1, 1),
        ({"gres": "nvme:3"}, 0, 1),
        ({"gpus-per-node": 8, "ntasks-per-node": 4}, 8, 4),
        ({"ntasks-per-node": 2}, 0, 2),
    ],
)
def test_processes_of_a_node_follow_from_its_options(options: dict[str, Any], gpus: int, processes: int):
    group = Group(sbatch=options)
    assert (group.gpus_per_node, group.processes_per_node) == (gpus, processes)


@pytest.mark.parametrize("name", ["nodes", "array", "output", "ntasks", "het-group"])
def test_what_towline_counts_itself_is_refused(name: str):
    with pytest.raises(ValidationError, match="follows from the experiment"):
        read(trainer={"sbatch": {name: 2}})


@pytest.mark.parametrize("name", ["gpus", "gpus-per-task", "gpus-per-socket"])
def test_gpus_that_are_not_counted_a_node_are_refused(name: str):
    with pytest.raises(ValidationError, match=f"{name} does not say how many GPUs a node has; write gpus-per-node"):
        Group(sbatch={name: 4})


def test_options_are_written_without_dashes():
    with pytest.raises(ValidationError, match='without dashes: "partition"'):
        read(trainer={"sbatch": {"--partition": "gpu"}})


def test_one_job_needs_one_kind_of_node():
    trainer, rollout = (
        {"sbatch": {"partition": "a", "time": "1:00:00"}},
        {"sbatch": {"partition": "b", "time": "1:00:00"}},
    )
    with pytest.raises(ValidationError, match="differ in partition"):
        read(layout="single", trainer=trainer, rollout=rollout)
    assert not read(layout="auto", trainer=trainer, rollout=rollout).is_single
    assert read(layout="auto", trainer=trainer, rollout=trainer).is_single
    assert not read(layout="het", trainer=trainer, rollout=trainer).is_single


def test_a_command_that_names_the_image_needs_one():
    with pytest.raises(ValidationError, match=r"software\.image is not set"):
        read(software={"run": "apptainer exec {image}"})


def test_it_survives_the_way_through_the_run_folder():
    profile = read(**{"continue": "resubmit"}, vars={"MODELS": "/m"}, trainer={"sbatch": {"exclusive": True, "mem": 0}})
    assert ClusterProfile.model_validate_json(json.dumps(profile.dump())) == profile
