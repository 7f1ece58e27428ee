"""Heterogeneous jobs on a real cluster. All jobs are submitted first and run beside each other."""

import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import pytest
import submitit
from submitit.core.utils import DelayedSubmission, FailedJobError

from towline.jobs.slurm.command import slurm
from towline.jobs.slurm.text import outside_a_job, submitted_job_id
from towline.launcher.het_executor import ComponentDied, HetSlurmExecutor, HetSlurmJob
from towline.launcher.het_job import HetInfoWatcher

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.filterwarnings("ignore::towline.launcher.het_executor.NoCheckpointWarning"),
]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SMALL = {"time": 3, "mem": 100}
COMPONENTS = {
    "trainer": SMALL | {"ntasks": 2},
    "rollout": SMALL | {"nodes": 2, "ntasks-per-node": 1},
}
PARTITIONS = {"trainer": "main", "rollout": "debug"}


def where_am_i() -> dict[str, object]:
    job = submitit.JobEnvironment()
    return {
        "job": job.job_id,
        "rank": job.global_rank,
        "ranks": job.num_tasks,
        "host": socket.gethostname(),
        "hosts": tuple(job.hostnames),
        "partition": os.environ["SLURM_JOB_PARTITION"],
    }


def fail() -> None:
    raise ValueError("raised on the node")


def be_killed() -> None:
    if submitit.JobEnvironment().global_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(120)


def wait_long() -> None:
    time.sleep(120)


class Counter:
    """Counts its starts; says in a file of its own that it runs."""

    def __init__(self, running: Path, num_starts: int = 1) -> None:
        self.running = running
        self.num_starts = num_starts

    def __call__(self) -> tuple[int, str]:
        if self.num_starts == 1:
            job = submitit.JobEnvironment()
            Path(f"{self.running}-{job.job_id}-{job.global_rank}").touch()
            time.sleep(120)
        return self.num_starts, os.environ.get("SLURM_RESTART_COUNT", "0")

    def checkpoint(self) -> DelayedSubmission:
        return DelayedSubmission(Counter(self.running, self.num_starts + 1))


@dataclass
class Submitted:
    folder: Path
    whole: HetSlurmJob
    split: dict[str, HetSlurmJob]
    failing: HetSlurmJob
    killed: dict[str, HetSlurmJob]
    cancelled: dict[str, HetSlurmJob]
    counting: HetSlurmJob
    counting_split: dict[str, HetSlurmJob]


@pytest.fixture(scope="module")
def jobs(cluster) -> Iterator[Submitted]:
    folder = cluster.shared / "it's het (1)"
    executor = HetSlurmExecutor(folder, COMPONENTS)
    one_rank = HetSlurmExecutor(folder, {name: SMALL | {"ntasks": 1} for name in ("trainer", "rollout")})
    placed = {name: options | {"partition": PARTITIONS[name]} for name, options in COMPONENTS.items()}
    submitted = Submitted(
        folder=folder,
        counting=one_rank.submit(Counter(folder / "running")),
        counting_split=executor.submit_components(dict.fromkeys(COMPONENTS, Counter(folder / "running"))),
        cancelled=one_rank.submit_components(dict.fromkeys(COMPONENTS, wait_long)),
        killed=executor.submit_components({"trainer": wait_long, "rollout": be_killed}),
        split=HetSlurmExecutor(folder, placed).submit_components(dict.fromkeys(COMPONENTS, where_am_i)),
        whole=one_rank.submit(where_am_i),
        failing=one_rank.submit(fail),
    )
    yield submitted
    for job in (submitted.whole, submitted.failing, submitted.counting):
        job.cancel(check=False)
    for components in (submitted.split, submitted.killed, submitted.cancelled, submitted.counting_split):
        components["trainer"].cancel(check=False)


@pytest.fixture(autouse=True)
def _ask_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute between two questions is kind to a real controller, too long for a test."""
    monkeypatch.setattr(HetSlurmJob, "watcher", HetInfoWatcher(delay_s=1))
    monkeypatch.setattr(HetSlurmJob, "_results_timeout_s", 2)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.2)


def test_a_signal_checkpoints_requeues_and_goes_on(jobs: Submitted) -> None:
    single, split = jobs.counting, jobs.counting_split["trainer"]
    running = [
        f"running-{single.job_id}-0",
        *(f"running-{split.leader_id}+{k}-{rank}" for k in (0, 1) for rank in (0, 1)),
    ]
    wait_until(lambda: all((jobs.folder / name).exists() for name in running), "the jobs run")
    single._interrupt(timeout=True)
    # Without --batch: it is the steps that get it.
    slurm(["scancel", "--signal=USR2", split.leader_id])
    assert single.result() == (2, "1")
    for job in jobs.counting_split.values():
        assert job.results() == [(2, "1"), (2, "1")]


def test_a_whole_job_has_one_result_and_the_states_of_its_components(jobs: Submitted) -> None:
    result = jobs.whole.result()
    assert (result["job"], result["rank"]) == (jobs.whole.job_id, 0)
    id = jobs.whole.job_id
    assert jobs.whole.components == {"trainer": f"{id}+0", "rollout": f"{id}+1"}
    wait_until(lambda: jobs.whole.component_states() == dict.fromkeys(COMPONENTS, "COMPLETED"), "both completed")
    assert jobs.whole.state == "COMPLETED"


def test_each_rank_of_each_component_has_a_result(jobs: Submitted) -> None:
    for number, (name, job) in enumerate(jobs.split.items()):
        results = job.results()
        assert [(row["rank"], row["ranks"]) for row in results] == [(0, 2), (1, 2)]
        assert {row["job"] for row in results} == {f"{job.leader_id}+{number}"}
        assert {row["partition"] for row in results} == {PARTITIONS[name]}
    assert [row["host"] for row in results] == list(results[0]["hosts"])


def test_an_exception_comes_with_its_traceback(jobs: Submitted) -> None:
    with pytest.raises(FailedJobError, match=r"in fail\n(.*\n)*ValueError: raised on the node"):
        jobs.failing.result()


def test_a_killed_rank_ends_the_job_and_is_named(jobs: Submitted) -> None:
    with pytest.raises(ComponentDied) as died:
        jobs.killed["rollout"].task(1).result()
    id = jobs.killed["rollout"].job_id
    assert f"component rollout ({id}), rank 1, ended without a result" in str(died.value)
    assert f"rollout ({id}): FAILED, exit code" in str(died.value)
    assert str(jobs.folder / f"{id}_1_log.err") in str(died.value)
    # srun tells the highest exit code of its tasks: of the killed one, or of one that it ended while it started.
    first = r"component trainer(.*\n)*Of the whole job: .*component rollout .* code 1(37|43)"
    with pytest.raises(ComponentDied, match=first):
        jobs.killed["trainer"].results()


def test_cancelling_one_component_cancels_the_job(jobs: Submitted) -> None:
    trainer, rollout = jobs.cancelled.values()
    wait_until(lambda: rollout.state == "RUNNING", "the job runs")
    rollout.cancel()
    wait_until(lambda: trainer.state == rollout.state == "CANCELLED", "both cancelled")
    with pytest.raises(ComponentDied, match="CANCELLED"):
        trainer.result()


def test_the_script_can_be_submitted_by_hand(jobs: Submitted) -> None:
    script = HetSlurmExecutor(jobs.folder, COMPONENTS).prepare(where_am_i)
    id = submitted_job_id(slurm(["sbatch", "--chdir=/", str(script)], environment=outside_a_job(os.environ)))
    result = jobs.folder / f"{id}_0_result.pkl"
    wait_until(result.exists, "the result of the job submitted by hand")
    outcome, value = pickle.loads(result.read_bytes())
    assert outcome == "success"
    assert value["job"] == id
