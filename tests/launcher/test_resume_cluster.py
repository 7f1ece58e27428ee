"""`towline resume` of a run that was handed to Slurm hands in a further job, and never trains here."""

import json

import pytest

from fake_slurm import FakeSlurm
from launcher_jobs import pending
from towline.jobs.load_experiment import recorded_experiment
from towline.launcher import resume as resume_module
from towline.launcher.cli import command
from towline.storage.run_directory import RunDirectory, read_jsonl

pytestmark = pytest.mark.usefixtures("slurm")


@pytest.fixture
def run(cluster_run: RunDirectory, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    slurm.answers("sbatch", "Submitted batch job 20")
    slurm.answers("scontrol", "")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("TOWLINE_ALLOW_LOGIN", raising=False)
    monkeypatch.setattr("towline.launcher.submit.partition_problems", lambda profile, components: [])
    cluster_run.write_state(status="stopped", next_step=2)
    return cluster_run


def resume(run: RunDirectory, *overrides: str) -> int:
    return command(["resume", str(run.root), *(word for item in overrides for word in ("-o", item))])


def test_a_further_job_is_handed_in(run: RunDirectory, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]) -> None:
    assert resume(run, "steps=8") == 0
    assert slurm.calls("sbatch") == [str(run.slurm / "callable.sh")]
    row = read_jsonl(run.submissions)[-1]
    assert (row["job"], row["submission"], row["components"]) == ("20", 1, {"trainer": "20+0", "rollout": "20+1"})
    assert run.read_state()["status"] == "queued"
    experiment = recorded_experiment(run.config.read_text())
    assert (experiment.steps, experiment.local.trainer_ranks, experiment.local.engines) == (8, 2, 2)
    assert json.loads(run.environment.read_text())["overrides"] == ["steps=8"]
    said = capsys.readouterr().out
    assert said.startswith("layout  heterogeneous job: trainer 2 nodes + rollout 2 nodes\n")
    assert "\nSubmitted 20   run small-1   " in said
    assert "\nnext    towline status small-1" in said


def test_the_snapshot_of_the_run_is_what_runs(run: RunDirectory) -> None:
    assert resume(run) == 0
    assert f"export PYTHONPATH={run.code}" in (run.slurm / "callable.sh").read_text()


def test_it_is_named_by_a_relative_folder_as_well(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.root.parent.parent)
    assert command(["resume", "small-1"]) == 0
    assert f"--output={run.root}/logs/batch.log" in (run.slurm / "callable.sh").read_text()


def test_a_smoke_test_stays_one_though_its_job_wrote_the_last_row(run: RunDirectory) -> None:
    rows = [{"job": "12", "submission": 0, "submitted": 1.0, "smoke": True}, {"job": "13", "submission": 0,
                                                                              "submitted": 2.0}]  # fmt: skip
    run.submissions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert resume(run) == 0
    assert read_jsonl(run.submissions)[-1]["smoke"] is True


@pytest.mark.parametrize("job", ["12", "15"])
def test_it_is_refused_while_a_job_of_the_run_waits_or_runs(
    run: RunDirectory, slurm: FakeSlurm, job: str, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.queue(*pending(job, f"{run.slurm}/callable.sh"))
    assert resume(run) == 2
    assert f"small-1 has a job that waits or runs: {job} (pending). Nothing was submitted." in capsys.readouterr().err
    assert slurm.calls("sbatch") == []


def test_what_the_run_is_made_of_may_not_change(
    run: RunDirectory, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.config.read_bytes()
    assert resume(run, "seed=7") == 2
    assert "small-1 cannot go on with seed = 7" in capsys.readouterr().err
    assert (run.config.read_bytes(), slurm.calls("sbatch")) == (before, [])


def test_a_finished_run_says_how_to_train_on(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.write_state(status="done", next_step=3)
    assert resume(run) == 2
    assert "small-1 is done: 3 of 3 steps." in capsys.readouterr().err


def test_used_up_node_hours_are_found_before_the_queue(
    run: RunDirectory, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(run, "nodes.max_node_hours=0.05") == 2
    assert "small-1 has used 0.1 node-hours and nodes.max_node_hours is 0.05" in capsys.readouterr().err
    assert slurm.calls("sbatch") == []
    assert resume(run, "nodes.max_node_hours=1") == 0


def test_when_sbatch_refuses_the_state_is_what_it_was(run: RunDirectory, slurm: FakeSlurm) -> None:
    before = run.read_state()
    slurm.fails("sbatch", "sbatch: error: Invalid account")
    assert resume(run) == 1
    assert run.read_state() == before
    assert len(read_jsonl(run.submissions)) == 1


def test_it_never_trains_here(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(resume_module, "carry_out", lambda *args: started.append(args))
    assert resume(run) == 0
    assert started == []
