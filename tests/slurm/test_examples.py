"""Training on given examples: a job of the trainer's nodes alone, through a requeue, to the bits of one machine."""

from pathlib import Path

import pytest

from integration.bits import differences
from slurm.conftest import slurm
from slurm.slurm_runs import ROOT, SlurmRun, command, options

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
EXPERIMENT = ROOT / "tests" / "slurm" / "sft.toml"


def test_a_job_of_trainer_nodes_alone_goes_on_after_a_requeue_with_the_bits_of_one_machine(cluster):
    run = SlurmRun(cluster.shared, "taught", experiment=EXPERIMENT)
    assert "layout  one job of 2 nodes" in run.said
    assert "rollout" not in run.said
    saved = run.wait_for_checkpoint(0)
    slurm("scontrol", "requeue", run.job)
    run.wait_until(lambda: len(run.attempts) > 1, "second attempt")
    run.wait_until_done()
    command("run", str(EXPERIMENT), *options(("run.name=taught-here",)), cwd=cluster.shared)
    here: Path = cluster.shared / "runs" / "taught-here"
    assert differences(run.folder, here, without=("ledger",)) == []
    first, last = run.attempts
    assert first["nodes"] == ["trainer0", "trainer1"]
    assert last["checkpoint"] >= saved
    assert last["outcome"] == "done"
