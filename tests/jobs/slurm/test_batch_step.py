"""What follows an attempt: requeue, successor, end; and what keeps a job from going on in vain."""

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from towline.jobs.slurm import allocation, batch_step, continuation
from towline.jobs.slurm.attempts import AttemptBook
from towline.jobs.slurm.batch_step import BatchStep
from towline.jobs.supervisor import Outcome
from towline.storage.errors import BudgetReached, RunFault, RunStopped, SlurmError, TowlineError
from towline.storage.run_directory import RunDirectory, read_jsonl, write_json

ENVIRONMENT = {
    "SLURM_JOB_ID": "12",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "t1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "g2,n3",
    "SLURM_JOB_ID_HET_GROUP_0": "12",
    "SLURM_JOB_ID_HET_GROUP_1": "13",
}


class Ended(BaseException):
    """Slurm has ended the process."""


class World:
    """Slurm and the supervisor, as the batch step sees them."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.outcome: Outcome | Exception = Outcome(status="done", next_step=3)
        self.signals: list[int] = []
        self.lost: tuple[str, ...] = ()
        self.failed: tuple[str, ...] = ()
        self.deadline: Any = None
        self.is_taken = False
        self.measures: tuple[float, float] | None = None

    def supervise(self, run: RunDirectory, experiment: Any, log: Any, *, launcher: Any, deadline: Any) -> Outcome:
        number = run.attempts
        run.logs(number).mkdir(parents=True)
        log.on_attempt(number)
        deadline.signals += self.signals
        self.deadline = deadline
        if self.measures is not None:
            deadline.step_s, deadline.save_s = self.measures
        self.done.append("supervised")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    def requeue(self, job: str) -> None:
        self.done.append(("requeue", job))

    def successor(self, script: Path, after: str) -> str:
        self.done.append(("successor", script.name, after))
        return "40"

    def exclude(self, job: str, nodes: Any) -> None:
        self.done.append(("exclude", job, tuple(nodes)))

    def end(self, code: int) -> None:
        raise Ended


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    world = World()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    monkeypatch.setenv("TOWLINE_SUBMISSION", "callable")
    monkeypatch.setattr(batch_step, "supervise", world.supervise)
    monkeypatch.setattr(continuation, "requeue_leader", world.requeue)
    monkeypatch.setattr(allocation, "submit_successor", world.successor)
    monkeypatch.setattr(allocation, "exclude_nodes", world.exclude)
    monkeypatch.setattr(allocation, "cancel", lambda job: world.done.append(("cancel", job)))
    monkeypatch.setattr(allocation, "lost_nodes", lambda nodes: world.lost)
    monkeypatch.setattr(allocation, "is_being_taken", lambda job: world.is_taken)
    monkeypatch.setattr(allocation, "nodes_that_failed", lambda nodes, since: world.failed)
    monkeypatch.setattr(os, "_exit", world.end)
    return world


@pytest.fixture
def submitted(run: RunDirectory, make_experiment, world: World):
    """Carry out the batch step of a run with such a profile and such nodes."""

    def carry_out(submission: int = 0, *, nodes: dict[str, Any] | None = None, **profile: Any) -> Any:
        experiment = make_experiment(nodes={"trainer": 1, "rollout": 2, **(nodes or {})})
        write_json(run.config, experiment.model_dump(mode="json"))
        write_json(run.cluster, {"name": "x", **profile})
        return BatchStep(str(run.root), submission)()

    return carry_out


def outcomes(run: RunDirectory) -> list[str]:
    return [row.outcome for row in AttemptBook(run).rows()]


def test_a_run_that_is_done_says_so(run: RunDirectory, world: World, submitted):
    assert submitted() == {"status": "done", "run": str(run.root), "next_step": 3}
    assert world.done == ["supervised"]
    assert outcomes(run) == ["done"]
    assert [row["job"] for row in read_jsonl(run.submissions)] == ["12"]


@pytest.mark.parametrize("why", ["limit", "preempted"])
def test_a_limit_or_a_preemption_requeues_the_leader(run: RunDirectory, world: World, submitted, why: str):
    world.outcome = Outcome(status="stopped", next_step=2, why=why)
    with pytest.raises(Ended):
        submitted()
    assert world.done == ["supervised", ("requeue", "12")]
    assert outcomes(run) == [why]
    assert run.read_state()["status"] == "requeued"


@pytest.mark.parametrize(("is_taken", "done"), [(True, ["supervised"]), (False, ["supervised", ("requeue", "12")])])
def test_a_job_that_slurm_takes_away_does_not_requeue_itself(
    run: RunDirectory, world: World, submitted, is_taken: bool, done: list[Any]
):
    """Or a `scancel` would be undone; Slurm starts a preempted job again by itself."""
    world.outcome = Outcome(status="stopped", next_step=2, why="preempted")
    world.signals, world.is_taken = [15], is_taken
    with pytest.raises(Ended):
        submitted()
    assert world.done == done
    assert outcomes(run) == ["preempted"]


def test_a_controller_that_is_away_does_not_turn_an_orderly_stop_into_a_failure(
    run: RunDirectory, world: World, submitted, monkeypatch: pytest.MonkeyPatch
):
    def away(job: str) -> bool:
        raise SlurmError("no answer")

    monkeypatch.setattr(allocation, "is_being_taken", away)
    world.outcome, world.signals = Outcome(status="stopped", next_step=2, why="preempted"), [15]
    with pytest.raises(Ended):
        submitted()
    assert world.done == ["supervised", ("requeue", "12")]


def test_a_successor_that_cannot_be_cancelled_is_named(
    world: World, submitted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def away(job: str) -> None:
        raise SlurmError("no answer")

    monkeypatch.setattr(allocation, "cancel", away)
    monkeypatch.setattr(continuation, "own_script", lambda: Path("job.sh"))
    assert submitted(**{"continue": "resubmit"})["status"] == "done"
    assert "scancel 40" in capsys.readouterr().out


def test_an_attempt_goes_on_where_slurm_does_not_say_which_nodes_failed(
    run: RunDirectory, world: World, submitted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def away(nodes: Any, since: float) -> tuple[str, ...]:
        raise SlurmError("no answer")

    monkeypatch.setattr(allocation, "nodes_that_failed", away)
    world.outcome, world.signals, world.is_taken = RunFault("killed", checkpoint_kept=True), [15], True
    with pytest.raises(Ended):
        submitted()
    world.outcome, world.signals = Outcome(status="done", next_step=3), []
    assert submitted()["status"] == "done"
    assert "which nodes failed in attempt 0 is not known" in capsys.readouterr().out


def test_what_fails_before_the_supervisor_is_in_the_state(run: RunDirectory, world: World, submitted):
    run.write_state(status="queued")
    world.outcome = RunFault("x", checkpoint_kept=False)
    with pytest.raises(TowlineError, match="SLURM_JOB_NODELIST_HET_GROUP_2 is not set"):
        submitted(nodes={"scorer": 1})
    assert run.read_state()["status"] == "failed"
    assert "SLURM_JOB_NODELIST_HET_GROUP_2" in run.read_state()["fault"]
    assert world.done == []


def test_a_script_that_was_handed_in_by_hand_is_noted_with_its_components(run: RunDirectory, world: World, submitted):
    submitted()
    (row,) = read_jsonl(run.submissions)
    assert row["components"] == {"trainer": "12+0", "rollout": "12+1"}


def test_a_run_that_finished_while_the_limit_came_is_not_requeued(world: World, submitted):
    world.outcome = Outcome(status="done", next_step=3, why="limit")
    assert submitted()["status"] == "done"
    assert world.done == ["supervised"]


def test_the_next_attempt_times_its_stop_by_what_this_one_measured(run: RunDirectory, world: World, submitted):
    world.outcome, world.measures = Outcome(status="stopped", next_step=2, why="limit"), (2.0, 30.0)
    with pytest.raises(Ended):
        submitted()
    world.outcome, world.measures = Outcome(status="done", next_step=3), None
    submitted()
    assert (world.deadline.step_s, world.deadline.save_s) == (2.0, 30.0)


def test_a_user_who_stops_it_is_told_how_to_go_on(run: RunDirectory, world: World, submitted):
    world.outcome = Outcome(status="stopped", next_step=2, why="stopped")
    with pytest.raises(RunStopped, match=r"stopped at step 2 with checkpoint 2 kept \(stopped\)") as stopped:
        submitted()
    assert stopped.value.exit_code == 3
    assert world.done == ["supervised"]


def test_where_it_is_not_to_go_on_a_limit_is_the_end(world: World, submitted):
    world.outcome = Outcome(status="stopped", next_step=2, why="limit")
    with pytest.raises(RunStopped, match=r"\(limit\)"):
        submitted(**{"continue": "off"})
    assert world.done == ["supervised"]


def test_a_successor_is_there_before_the_run_begins_and_goes_on_after_it(run: RunDirectory, world: World, submitted):
    world.outcome = Outcome(status="stopped", next_step=2, why="limit")
    found = submitted(**{"continue": "resubmit"})
    assert found == {"status": "continued", "run": str(run.root), "job": "40"}
    assert world.done == [("successor", "callable.sh", "12"), "supervised"]


@pytest.mark.parametrize("outcome", [Outcome(status="done", next_step=3), RunFault("x", checkpoint_kept=True)])
def test_the_successor_of_a_run_that_is_done_or_failed_is_cancelled(world: World, submitted, outcome: Any):
    world.outcome = outcome
    with contextlib.suppress(RunFault):
        submitted(**{"continue": "resubmit"})
    assert world.done[-1] == ("cancel", "40")


def test_a_fault_is_the_end_and_is_not_tried_again(run: RunDirectory, world: World, submitted):
    world.outcome = RunFault("trainer.0 failed", checkpoint_kept=True)
    with pytest.raises(RunFault, match=r"trainer\.0 failed"):
        submitted()
    assert world.done == ["supervised"]
    assert outcomes(run) == ["failed"]


def test_processes_that_die_while_slurm_takes_the_job_away_are_no_fault(run: RunDirectory, world: World, submitted):
    """Whoever waits for the result must not be told of a failure: the job starts again."""
    world.outcome, world.signals = RunFault("trainer.0 killed", checkpoint_kept=True), [15]
    with pytest.raises(Ended):
        submitted()
    assert outcomes(run) == ["preempted"]


def test_a_fault_because_of_a_lost_node_goes_on(run: RunDirectory, world: World, submitted):
    world.outcome, world.lost = RunFault("trainer.1 is gone", checkpoint_kept=True), ("t1",)
    with pytest.raises(Ended):
        submitted()
    assert world.done[-1] == ("requeue", "12")
    (row,) = AttemptBook(run).rows()
    assert (row.outcome, row.failed_nodes) == ("node lost", ("t1",))


def test_a_node_that_failed_twice_is_excluded_when_the_job_is_requeued(run: RunDirectory, world: World, submitted):
    # case G4-31
    world.outcome, world.lost = RunFault("gone", checkpoint_kept=True), ("n3",)
    for _ in range(2):
        with pytest.raises(Ended):
            submitted()
    assert world.done == ["supervised", ("requeue", "12"), "supervised", ("requeue", "12"), ("exclude", "12", ("n3",))]
    # It is not tried for ever: neither of the two left a checkpoint.
    with pytest.raises(RunStopped, match="2 attempts in a row ended without a new checkpoint"):
        submitted()


def test_where_a_node_cannot_be_excluded_the_run_goes_on_all_the_same(
    run: RunDirectory, world: World, submitted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(job: str, nodes: Any) -> None:
        raise SlurmError("no answer")

    monkeypatch.setattr(allocation, "exclude_nodes", refuse)
    world.outcome, world.lost = RunFault("gone", checkpoint_kept=True), ("n3",)
    for _ in range(2):
        with pytest.raises(Ended):
            submitted()
    assert run.read_state()["status"] == "requeued"
    assert "! job 12 may get n3 again, which failed twice: no answer" in capsys.readouterr().out


def test_a_successor_is_submitted_without_the_node_that_failed_twice(run: RunDirectory, world: World, submitted):
    """An attempt that was killed cannot say so itself: the next one asks Slurm which of its nodes went down."""
    book = AttemptBook(run)
    for number in range(2):
        run.logs(number).mkdir(parents=True)
        book.begin(number, "12", 0, ("t1", "g1", "g2"))
        book.note_failed_nodes(number, ("g2",) if number == 0 else ())
        (run.checkpoints / f"step-{number + 1:06d}").mkdir(parents=True)
        (run.checkpoints / f"step-{number + 1:06d}" / "complete.json").write_text("{}")
    world.failed = ("g2",)
    submitted(**{"continue": "resubmit"})
    assert world.done[:2] == [("successor", "callable.sh", "12"), ("exclude", "40", ("g2",))]


def test_a_third_attempt_in_vain_is_refused_before_anything_starts(run: RunDirectory, world: World, submitted):
    world.outcome = Outcome(status="stopped", next_step=0, why="limit")
    for _ in range(2):
        with pytest.raises(Ended):
            submitted()
    with pytest.raises(RunStopped, match="2 attempts in a row ended without a new checkpoint"):
        submitted()
    assert world.done.count("supervised") == 2
    submitted_again = BatchStep(str(run.root), 1)
    world.outcome = Outcome(status="done", next_step=3)
    assert submitted_again()["status"] == "done"


def test_node_hours_bound_the_whole_run(run: RunDirectory, world: World, submitted):
    submitted(nodes={"max_node_hours": 30.0})
    left_s = world.deadline.budget_end - time.time()
    assert left_s == pytest.approx(30 * 3600 / 3, abs=5)
    rows = [json.loads(line) for line in run.attempts_file.read_text().splitlines()]
    rows[0]["began"] = rows[-1]["ended"] - 10 * 3600  # three nodes for ten hours
    run.attempts_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(BudgetReached, match=r"30 node-hours are used") as reached:
        submitted(nodes={"max_node_hours": 30.0})
    assert reached.value.exit_code == 5


def refuse_requeue(job: str) -> None:
    raise SlurmError("`scontrol requeue 12` cannot be run: scontrol is not on PATH here")


def test_where_slurm_refuses_the_requeue_a_successor_goes_on(
    run: RunDirectory, world: World, submitted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # case G4-17
    monkeypatch.setattr(continuation, "requeue_leader", refuse_requeue)
    world.outcome = Outcome(status="stopped", next_step=2, why="limit")
    assert submitted() == {"status": "continued", "run": str(run.root), "job": "40"}
    assert world.done == ["supervised", ("successor", "callable.sh", "12")]
    assert (run.read_state()["status"], run.read_state()["job"]) == ("continued", "40")
    assert [row["job"] for row in read_jsonl(run.submissions)] == ["12", "40"]
    said = capsys.readouterr().out
    assert "cannot requeue itself: `scontrol requeue 12` cannot be run: scontrol is not on PATH here" in said
    assert "Its successor 40 goes on" in said


def test_where_slurm_takes_no_successor_either_nothing_is_lost_and_the_way_on_is_said(
    run: RunDirectory, world: World, submitted, monkeypatch: pytest.MonkeyPatch
):
    # case G4-17: the whole job in a container without Slurm's commands; the exit code is that of a kept checkpoint
    def refuse(script: Path, after: str) -> str:
        raise SlurmError("sbatch is not on PATH here")

    monkeypatch.setattr(continuation, "requeue_leader", refuse_requeue)
    monkeypatch.setattr(allocation, "submit_successor", refuse)
    world.outcome = Outcome(status="stopped", next_step=2, why="limit")
    with pytest.raises(RunStopped, match=r"sbatch is not on PATH here\n  Nothing is lost. Next: towline resume") as end:
        submitted()
    assert end.value.exit_code == 3
    assert run.read_state()["status"] == "stopped"


def test_what_submitit_carries_has_a_checkpoint(run: RunDirectory):
    # case G4-15: a signal that comes before the supervisor listens starts the same attempt again
    step = BatchStep(str(run.root), 1, is_smoke=True)
    delayed = step.checkpoint()
    assert (delayed.function, delayed.args, delayed.kwargs) == (step, (), {})
