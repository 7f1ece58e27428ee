"""One experiment, four ways to a cluster, the same bits; real engines, real trainer ranks, on four nodes."""

import subprocess
from pathlib import Path

import pytest

from integration.bits import differences
from slurm.slurm_runs import EXPERIMENT, SCRIPTED, SlurmRun, command, options, profile

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def on_one_machine(cluster) -> Path:
    """`towline run`, which knows nothing of Slurm."""
    command("run", str(EXPERIMENT), *options(("run.name=local",)), cwd=cluster.shared)
    return cluster.shared / "runs" / "local"


def test_a_het_job_learns_the_bits_of_one_machine(cluster, on_one_machine: Path):
    run = SlurmRun(cluster.shared, "het")
    run.wait_until_done()
    assert differences(run.folder, on_one_machine) == []
    (attempt,) = run.attempts
    assert attempt["nodes"] == ["trainer0", "trainer1", "rollout0", "rollout1"]
    assert attempt["outcome"] == "done"


def test_start_up_is_broken_down_and_ours_is_short(cluster, on_one_machine: Path):
    """Of the run before."""
    text = (cluster.shared / "runs" / "het" / "logs" / "attempt-0" / "supervisor.log").read_text()
    line = next(line for line in text.splitlines() if "start-up" in line)
    total_s, own_s = (float(line.partition(before)[2].partition(" s")[0]) for before in ("start-up ", "of which "))
    # A machine that does other things too takes longer for everything.
    assert own_s <= max(2.0, 0.2 * total_s), text
    assert "imports of the supervisor" in text
    assert "publication" not in text


def test_from_python_it_is_a_submitit_job(cluster, on_one_machine: Path, monkeypatch: pytest.MonkeyPatch):
    """With a scorer on each rollout node, by the way."""
    from towline.launcher import submit_experiment

    monkeypatch.chdir(cluster.shared)
    job = submit_experiment(EXPERIMENT, cluster="dev", overrides=("run.name=python", "nodes.scorer=rollout"))
    assert job.components == {"trainer": f"{job.job_id}+0", "rollout": f"{job.job_id}+1"}
    assert job.result() == {"status": "done", "next_step": 6, "run": str(cluster.shared / "runs" / "python")}
    assert job.exception() is None
    run = cluster.shared / "runs" / "python"
    assert differences(run, on_one_machine) == []
    assert all("p50" in (run / "logs" / "attempt-0" / f"scorer.{n}.log").read_text() for n in (0, 1))


def test_sbatch_of_the_dry_run_is_the_same_run(cluster, on_one_machine: Path):
    """As in `towline submit X --dry-run > job.sh && sbatch job.sh`."""
    arguments = [str(EXPERIMENT), "--cluster", "dev", "--dry-run", *options(("run.name=by-hand",))]
    done = command("submit", *arguments, cwd=cluster.shared)
    assert "Nothing was submitted" in done.stderr
    assert "layout  heterogeneous job: trainer 2 nodes + rollout 2 nodes" in done.stderr
    script = cluster.shared / "job.sh"
    script.write_text(done.stdout)
    assert script.read_text() == (cluster.shared / "runs" / "by-hand" / "slurm" / "callable.sh").read_text()
    subprocess.run(["sbatch", "--wait", str(script)], check=True, capture_output=True, timeout=240)
    assert differences(cluster.shared / "runs" / "by-hand", on_one_machine) == []


def test_one_homogeneous_job_learns_the_same_bits(cluster, on_one_machine: Path):
    """Without MPI, with the model copied to each node, and with a home folder that nothing can be written to."""
    sbatch = '{ partition = "main", time = "00:30:00", mem = 4000 }'
    changes = {"layout": '"single"', "mpi": '"none"', "trainer__sbatch": sbatch, "rollout__sbatch": sbatch}
    changes |= {"folders__stage_model": "true", "software__env__HOME": '"/proc"'}
    single = profile(cluster.shared, "single", **changes)
    run = SlurmRun(cluster.shared, "single", cluster=single)
    assert "layout  one job of 4 nodes, split by the supervisor: trainer 2 nodes + rollout 2 nodes" in run.said
    run.wait_until_done()
    assert differences(run.folder, on_one_machine) == []
    left = subprocess.run(
        ["srun", "--nodes=4", "--mem=100", "sh", "-c", f"ls -d /tmp/towline-*-{run.job} 2>/dev/null"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert left.stdout == "", "copies of the model stay on the nodes"


def test_an_mpi_that_makes_worlds_of_one_is_refused_and_the_mend_is_said(cluster):
    run = SlurmRun(cluster.shared, "singletons", *SCRIPTED, cluster=profile(cluster.shared, "pmi2", mpi='"pmi2"'))
    run.wait_until(lambda: run.state["status"] == "failed", "fault")
    fault = run.state["fault"]
    assert "MPI: 2 tasks were started, but each sees a world of 1" in fault
    assert "srun --mpi=list" in fault
    assert run.num_steps == 0
    run.wait_until(lambda: not run.queue(), "end of the job")


def test_where_a_user_may_run_one_job_smoke_and_single_run_and_het_says_why_it_cannot(cluster):
    sbatch = '{ partition = "debug", time = "00:10:00", mem = 4000 }'
    het = profile(cluster.shared, "debug", trainer__sbatch=sbatch, rollout__sbatch=sbatch)
    arguments = ["submit", str(EXPERIMENT), "--cluster", str(het)]
    refused = command(*arguments, cwd=cluster.shared, check=False)
    assert refused.returncode == 2
    assert "lets a user run 1 job at a time" in refused.stderr
    assert 'Set layout = "single"' in refused.stderr
    few = ("rollout.engine=scripted", "steps=2")
    smoke = SlurmRun(cluster.shared, "smoke", *few, smoke=True)
    smoke.wait_until_done()
    assert len(smoke.attempts[0]["nodes"]) == 1
    single = profile(cluster.shared, "debug-1", layout='"single"', trainer__sbatch=sbatch, rollout__sbatch=sbatch)
    run = SlurmRun(cluster.shared, "debug", *few, cluster=single)
    run.wait_until_done()
    assert len(run.attempts[0]["nodes"]) == 4
