"""What a user sees and does after submitting: a job that waits, and one that runs, is stopped, and goes on."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurm.slurm_runs import DEV, SCRIPTED, SlurmRun, command, profile, slurm
from towline.storage.run_directory import read_jsonl

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


@pytest.fixture
def submitted(cluster) -> Iterator[Callable[..., SlurmRun]]:
    """Submits a run of that name; its jobs do not outlive the test."""
    runs: list[SlurmRun] = []

    def submit(name: str, *overrides: str, profile: Path = DEV) -> SlurmRun:
        runs.append(SlurmRun(cluster.shared, name, *overrides, cluster=profile))
        return runs[-1]

    yield submit
    for run in runs:
        slurm("scancel", *(row["job"] for row in read_jsonl(run.folder / "submissions.jsonl")), check=False)


def said(verb: str, run: SlurmRun, *arguments: str, code: int = 0) -> str:
    done = command(verb, run.folder.name, *arguments, cwd=run.root, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_job_that_waits_says_why_and_is_cancelled(cluster, submitted) -> None:
    later = '{ partition = "main", time = "00:10:00", mem = 4000, begin = "now+1hour" }'
    run = submitted("waits", profile=profile(cluster.shared, "later", trainer__sbatch=later))
    first, *lines = said("status", run).splitlines()
    assert first.startswith(f"waits  PENDING  job {run.job} waits since ")
    assert any(line.startswith("trainer 2 nodes  PENDING  ") for line in lines)
    assert any(line.startswith("rollout 2 nodes  PENDING  ") for line in lines)
    assert f"{run.job} (pending). Nothing was submitted." in said("resume", run, code=2)
    assert "has no logs yet" in said("logs", run, code=2)
    assert f"job {run.job} is cancelled; it was waiting" in said("cancel", run)
    run.wait_until(lambda: not run.queue(), "end of the job", 30)
    assert said("status", run).startswith(f"waits  CANCELLED  job {run.job}\n")
    assert "waits is not active" in said("cancel", run, code=2)


def test_a_run_is_stopped_with_a_checkpoint_and_goes_on_in_the_same_folder(submitted) -> None:
    run = submitted("stops", *SCRIPTED, "steps=10000")
    first_job = run.job
    run.wait_until(lambda: run.num_steps >= 2, "two steps")
    first, nodes, *_ = said("status", run).splitlines()
    assert first.startswith(f"stops  RUNNING  attempt 0 of job {first_job}  for ")
    assert nodes.startswith("trainer 2/2 nodes   rollout 2/2 nodes   time left ")
    assert "attempt   0  trainer.0" in said("logs", run)
    assert "step " in said("logs", run, "batch", "-n", "3")
    assert "Did you mean scorer.0?" in said("logs", run, "scores.0", code=2)

    assert f"job {first_job} is asked to stop" in said("cancel", run)
    assert said("status", run, "--follow", code=3).count("STOPPED") == 1
    stopped = run.state["next_step"]
    assert run.checkpoints[-1] == stopped
    run.wait_until(lambda: not run.queue(), "end of the job", 30)

    last = stopped + 2
    answer = said("resume", run, "-o", f"steps={last}")
    assert f"Submitted {run.job}   run stops" in answer
    assert run.job != first_job
    assert said("logs", run, "supervisor", "--follow").startswith("==> supervisor")
    assert run.state["status"] == "done"
    assert [row["submission"] for row in read_jsonl(run.folder / "submissions.jsonl")] == [0, 1]
    assert [row["step"] for row in read_jsonl(run.folder / "metrics.jsonl")] == list(range(last))
    text = command("status", f"{run.job}+1", cwd=run.root).stdout
    assert text.startswith(f"stops  DONE  attempt 1 of job {run.job}")
