"""env/slurm keeps four nodes running, and can take one away."""

import socket
import sys
import time

import pytest

from slurm.conftest import Cluster, slurm

pytestmark = pytest.mark.slurm

NODES = {"trainer0", "trainer1", "rollout0", "rollout1"}
SLURMD_PORT = 6818

HET_JOB = """#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --time=2 --output=job.out --nodelist=trainer0
#SBATCH hetjob
#SBATCH --nodes=2 --ntasks=2 --gpus-per-node=2 --nodelist=rollout[0-1]
srun --het-group=0 hostname
srun --het-group=1 bash -c 'echo $(hostname) $CUDA_VISIBLE_DEVICES' | sort
"""


def pids(cluster: Cluster) -> dict[str, str]:
    return {path.name: path.read_text() for path in (cluster.folder / "run").glob("*.pid") if ".own." not in path.name}


def test_what_runs_is_left_alone(cluster: Cluster) -> None:
    before, began = pids(cluster), time.monotonic()
    assert cluster.up().splitlines()[-1] == f"export SLURM_CONF={cluster.folder}/etc/slurm.conf"
    assert time.monotonic() - began < 1
    assert pids(cluster) == before


def test_four_nodes_are_idle(cluster: Cluster) -> None:
    cluster.wait_idle()
    assert cluster.states() == dict.fromkeys(NODES, "idle")


def test_nodes_differ_in_all_but_the_shared_folder(cluster: Cluster) -> None:
    folder = cluster.shared / "seen"
    folder.mkdir()
    seen = (
        f"echo $(hostname) > {folder}/$(hostname); ip -4 -o address show eth0 | grep -o '10[.0-9]*' | head -1; ls /tmp"
    )
    addresses = slurm("srun", "--nodes=4", "bash", "-c", seen).split()
    assert {path.name for path in folder.iterdir()} == NODES
    assert {"10.77.0.11", "10.77.0.12", "10.77.0.21", "10.77.0.22"} <= set(addresses)


def test_a_het_job_runs_on_both_groups(cluster: Cluster) -> None:
    script = cluster.shared / "job.sh"
    script.write_text(HET_JOB)
    slurm("sbatch", "--wait", f"--chdir={cluster.shared}", str(script))
    assert (cluster.shared / "job.out").read_text().splitlines() == ["trainer0", "rollout0 0,1", "rollout1 0,1"]


def test_the_project_can_be_imported_on_every_node(cluster: Cluster) -> None:
    python = [sys.executable, "-c", "import towline.storage; print('imported')"]
    assert slurm("srun", "--nodes=4", *python).split() == ["imported"] * 4


def test_a_node_crashes_and_comes_back(cluster: Cluster) -> None:
    cluster.wait_idle()
    cluster.crash("rollout1")
    with pytest.raises(OSError, match=r"timed out|No route"):
        socket.create_connection(("10.77.0.22", SLURMD_PORT), timeout=1)
    cluster.boot("rollout1")
    cluster.wait_idle()
    socket.create_connection(("10.77.0.22", SLURMD_PORT), timeout=1).close()
    assert slurm("srun", "--nodelist=rollout1", "hostname") == "rollout1\n"
