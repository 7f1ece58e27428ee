"""A run on the cluster survives what happens to jobs, and learns the bits of one to which nothing happens."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from integration.bits import differences
from slurm.slurm_runs import DEV, EXPERIMENT, SCRIPTED, SlurmRun, command, options, profile, slurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
STEPS = 80
LONG = (*SCRIPTED, f"steps={STEPS}", "run.max_restarts=3")


@pytest.fixture(scope="module")
def undisturbed(cluster) -> Path:
    command("run", str(EXPERIMENT), *options((*LONG, "run.name=undisturbed")), cwd=cluster.shared)
    return cluster.shared / "runs" / "undisturbed"


def test_signals_requeues_preemptions_and_dead_processes_change_nothing(cluster, undisturbed: Path):
    """One run, one thing after the other; each new attempt goes on from the checkpoint before it."""
    run = SlurmRun(cluster.shared, "disturbed", *LONG)
    job = run.job

    run.wait_for_checkpoint(0)
    _kill_an_engine(run)
    run.wait_until(lambda: "rollout.1: killed by SIGKILL" in run.log, "news of the engine's death")

    slurm("scancel", "--signal=USR2", "--full", job)
    began_from = run.wait_for_checkpoint(1)
    assert run.attempts[0]["outcome"] == "limit"
    assert run.attempts[1]["checkpoint"] >= 5
    assert began_from > run.attempts[1]["checkpoint"]

    slurm("scontrol", "requeue", job)
    run.wait_for_checkpoint(2)

    _kill_the_controller(cluster)
    run.wait_for_checkpoint(2)

    preemptor = _submit_to_high()
    run.wait_until(lambda: "PENDING" in run.queue(), "preemption")
    slurm("scancel", preemptor)
    run.wait_until(lambda: len(run.attempts) == 4, "attempt after the preemption")

    run.wait_until_done()
    assert run.job == job
    assert [attempt["nodes"] for attempt in run.attempts] == [run.attempts[0]["nodes"]] * 4
    assert differences(run.folder, undisturbed) == []


def test_a_time_limit_shorter_than_the_run_is_met_with_a_checkpoint_in_time(cluster, undisturbed: Path):
    sbatch = {f"{group}__sbatch": _sbatch(group, "00:01:00") for group in ("trainer", "rollout")}
    run = SlurmRun(cluster.shared, "limited", *LONG, cluster=profile(cluster.shared, "limited", **sbatch))
    saved = run.wait_for_checkpoint(0)
    # It has to last until the limit comes near.
    _signal_on_node(run, "scorer.0", signal.SIGSTOP)
    run.wait_until(lambda: "stopping (limit)" in run.log, "stop before the limit")
    # A slow machine may start in no less than a minute: the next attempt has more.
    run.wait_until(lambda: "PENDING" in run.queue(), "requeue")
    slurm("scontrol", "update", f"jobid={run.job}", "timelimit=30")
    run.wait_until_done()
    *limited, last = [attempt["outcome"] for attempt in run.attempts]
    assert (set(limited), last) == ({"limit"}, "done")
    assert run.attempts[1]["checkpoint"] >= saved
    assert "TIMEOUT" not in slurm("sacct", "--noheader", "--format=State", "--duplicates", f"--jobs={run.job}").stdout
    assert differences(run.folder, undisturbed) == []


def test_a_job_that_is_cancelled_stays_cancelled(cluster):
    """Its processes hear what they hear in a preemption, and stop as fast."""
    run = SlurmRun(cluster.shared, "cancelled", *LONG)
    run.wait_for_checkpoint(0)
    slurm("scancel", run.job)
    run.wait_until(lambda: not run.queue(), "end of the job")
    assert "CANCELLED" in slurm("sacct", "--noheader", "--format=State", f"--jobs={run.job}").stdout
    assert [attempt["outcome"] for attempt in run.attempts] == ["preempted"]
    # Whether its checkpoint was written in time is a matter of luck.
    first = command("status", "cancelled", cwd=cluster.shared).stdout.splitlines()[0]
    assert any(word in first for word in ("STOPPED", "CANCELLED", "INTERRUPTED")), first
    command("resume", "cancelled", *options(("steps=30",)), cwd=cluster.shared)
    run.wait_until_done()


def test_a_site_without_requeue_goes_on_in_a_successor(cluster, undisturbed: Path):
    run = SlurmRun(cluster.shared, "chain", *LONG, cluster=profile(cluster.shared, "chain", continue_='"resubmit"'))
    first = run.job
    run.wait_for_checkpoint(0)
    assert "Dependency" in slurm("squeue", "--noheader", "--name=chain", "--states=PENDING", "--format=%r").stdout
    slurm("scancel", "--batch", "--signal=USR2", first)
    run.wait_until_done()
    assert run.job != first
    assert [attempt["outcome"] for attempt in run.attempts] == ["limit", "done"]
    assert run.attempts[1]["job"] != first
    assert run.queue() == ""  # a successor's successor is not left behind
    assert differences(run.folder, undisturbed) == []


def test_the_grace_of_a_preemption_is_used_for_a_checkpoint(cluster, undisturbed: Path):
    """Only the steps hear of it. Another layout by the way: both ranks on one node, and a node that grades."""
    trainer = '{ partition = "low", time = "00:30:00", mem = 4000, nodelist = "trainer0", ntasks-per-node = 2 }'
    others = {
        "rollout__sbatch": '{ partition = "low", time = "00:30:00", mem = 4000, nodelist = "rollout[0-1]" }',
        "scorer__sbatch": '{ partition = "low", time = "00:30:00", mem = 2000, nodelist = "trainer1" }',
    }
    scores = profile(cluster.shared, "scores", trainer__sbatch=trainer, **others)
    run = SlurmRun(cluster.shared, "scores", *LONG, "nodes.trainer=1", "nodes.scorer=1", cluster=scores)
    assert "trainer 1 node + rollout 2 nodes + scorer 1 node" in run.said
    run.wait_for_checkpoint(0)
    # A step that is no multiple of what is saved anyway.
    run.wait_until(lambda: run.num_steps % 5 in (2, 3), "a step between checkpoints")
    preemptor = _submit_to_high()
    run.wait_until(lambda: "attempt ended: preempted" in run.log, "checkpoint in the grace")
    slurm("scancel", preemptor)
    run.wait_until_done()
    first, second = run.attempts
    assert first["nodes"] == ["trainer0", "rollout0", "rollout1", "trainer1"]
    assert (first["outcome"], second["outcome"]) == ("preempted", "done")
    assert f"going on from checkpoint {second['checkpoint']}\n" in run.log  # no step is trained again
    assert differences(run.folder, undisturbed) == []


def test_lost_nodes_start_the_run_again_on_whole_groups(cluster, undisturbed: Path):
    run = SlurmRun(cluster.shared, "lost", *LONG)
    run.wait_for_checkpoint(0)
    slurm("scontrol", "update", "nodename=trainer1", "state=down", "reason=test")
    run.wait_until(lambda: "PENDING" in run.queue(), "requeue")
    slurm("scontrol", "update", "nodename=trainer1", "state=resume")
    run.wait_for_checkpoint(1)
    cluster.crash("rollout1")
    run.wait_until(lambda: "PENDING" in run.queue(), "requeue after the node was lost")
    cluster.boot("rollout1")
    run.wait_until_done()
    assert [attempt.get("failed_nodes", []) for attempt in run.attempts] == [["trainer1"], ["rollout1"], []]
    assert differences(run.folder, undisturbed) == []


def test_a_lost_rollout_node_is_done_without_where_the_profile_says_so(cluster, undisturbed: Path):
    goes_on = profile(cluster.shared, "goes-on", on_node_loss='"continue"')
    run = SlurmRun(cluster.shared, "goes-on", *LONG, "steps=400", "nodes.scorer=rollout", cluster=goes_on)
    run.wait_for_checkpoint(0)
    trainer = run.find("trainer.0")["pid"]
    cluster.crash("rollout1")
    try:
        run.wait_until(lambda: "the run goes on with 1 of 2 engines" in run.log, "news of the lost node")
        steps = run.num_steps
        run.wait_until(lambda: run.num_steps > steps + 5, "further steps")
        assert run.find("trainer.0")["pid"] == trainer
        assert len(run.attempts) == 1
        assert "scorer.1: " in run.log  # it graded on that node, and goes on on the other
    finally:
        cluster.boot("rollout1")
    slurm("scancel", "--batch", "--signal=INT", run.job)
    run.wait_until(lambda: run.state["status"] == "stopped", "stop")
    run.wait_until(lambda: not run.queue(), "end of the job")
    assert run.attempts[0]["failed_nodes"] == ["rollout1"]
    # What it learned until then is what the other run learned.
    mine, theirs = ((folder / "metrics.jsonl").read_text().splitlines() for folder in (run.folder, undisturbed))
    assert _losses(mine[:STEPS]) == _losses(theirs[: len(mine)])


def _losses(rows: list[str]) -> list[tuple[float, float]]:
    return [(row["loss/policy"], row["loss/kl"]) for row in map(json.loads, rows)]


def _kill_an_engine(run: SlurmRun) -> None:
    """It starts again alone: the trainer's process stays, and no sealed rollout is generated again."""
    before = run.heartbeats()
    sealed = {path: path.stat().st_mtime_ns for path in (run.folder / "rollouts").rglob("chunk-*.h5")}
    _signal_on_node(run, "rollout.1", signal.SIGKILL)
    run.wait_until(lambda: (beat := run.heartbeats()["rollout.1"]) and beat["life"] == 1, "second life of the engine")
    after = run.heartbeats()
    assert after["trainer.0"]["pid"] == before["trainer.0"]["pid"]
    assert after["rollout.0"]["life"] == 0
    assert {path: path.stat().st_mtime_ns for path in sealed} == sealed


def _signal_on_node(run: SlurmRun, process: str, number: int) -> None:
    """To the process itself, found by what it was told: its pid is its node's."""
    role, _, rank = process.partition(".")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            environment = (folder / "environ").read_bytes()
        except OSError:
            continue
        is_role = f"towline.jobs.{role}_role".encode() in words and words[0].endswith(b"python")
        if is_role and words[-2] == rank.encode() and f"TOWLINE_RUN={run.folder}\0".encode() in environment:
            os.kill(int(folder.name), number)
            return
    raise AssertionError(f"no process is {process}")


def _kill_the_controller(cluster) -> None:
    root = EXPERIMENT.parents[2] / "env" / "slurm" / "controller.sh"
    for verb in ("kill", "start"):
        subprocess.run(["bash", str(root), verb], check=True, capture_output=True, timeout=60)
        time.sleep(1.0)


def _submit_to_high() -> str:
    words = [
        "sbatch",
        "--parsable",
        "--partition=high",
        "--nodes=4",
        "--exclusive",
        "--wrap=sleep 60",
        "--output=/dev/null",
    ]
    return slurm(*words).stdout.strip()


def _sbatch(group: str, limit: str) -> str:
    line = next(
        line for line in DEV.read_text().splitlines() if line.startswith("sbatch =") and f"{group}[0-1]" in line
    )
    return line.partition("= ")[2].replace("00:30:00", limit)
