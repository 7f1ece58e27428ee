"""Slurm takes the script of every shipped profile: `sbatch --test-only`, which checks a job and submits none."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from towline.jobs.slurm.text import outside_a_job

pytestmark = pytest.mark.slurm

GOLDEN = sorted((Path(__file__).parents[1] / "launcher" / "golden").glob("*.sh"))

# What the development cluster has not, and what stands in for it. Nothing else of a script is changed, and nothing of
# dev's. Its nodes have 4 CPUs and 2 GPUs of the type `fake`.
SUBSTITUTES = {
    "--partition=gpu": "--partition=main",
    "--account=ab123": "--account=towline",
    "--gpus-per-node=4": "--gpus-per-node=2",
    "--gres=gpu:a100:4": "--gres=gpu:fake:2",
    "--gres=gpu:a100:2": "--gres=gpu:fake:2",
    "--cpus-per-task=16": "--cpus-per-task=1",
}


def for_development(script: str) -> str:
    for theirs, ours in SUBSTITUTES.items():
        script = re.sub(rf"^(#SBATCH ){re.escape(theirs)}$", rf"\g<1>{ours}", script, flags=re.M)
    return script


def try_sbatch(script: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    (folder / "job.sh").write_text(script)
    return subprocess.run(
        ["sbatch", "--test-only", "job.sh"],
        cwd=folder, env=outside_a_job(os.environ), capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_slurm_takes_it(golden: Path, cluster, tmp_path: Path) -> None:
    script = golden.read_text() if golden.stem.startswith("dev") else for_development(golden.read_text())
    done = try_sbatch(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert " to start at " in done.stderr


@pytest.mark.parametrize(("old", "new"), [("--mem=4000", "--memory=4000"), ("rollout[0-1]", "rollout[7-8]")])
def test_what_slurm_does_not_know_would_be_noticed(old: str, new: str, cluster, tmp_path: Path) -> None:
    """In the second component, too."""
    script = next(path for path in GOLDEN if path.stem == "dev").read_text()
    leader, separator, other = script.partition("#SBATCH hetjob")
    assert old in other
    done = try_sbatch(leader + separator + other.replace(old, new), tmp_path)
    assert done.returncode != 0
    assert "memory" in done.stderr or "node" in done.stderr
