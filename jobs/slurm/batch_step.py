"""What runs in the batch step of a job: one attempt of a run, and what follows it. Imports no torch.

submitit carries it there, and brings back its result or exception.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towline.jobs.deadline import Deadline
from towline.jobs.experiment_parts import TrainerNodesConfig
from towline.jobs.load_experiment import recorded_experiment
from towline.jobs.slurm import allocation
from towline.jobs.slurm.attempts import MAX_IN_VAIN, MIN_LEFT_S, AttemptBook
from towline.jobs.slurm.batch_log import BatchLog
from towline.jobs.slurm.continuation import Continuation
from towline.jobs.slurm.placement import Place, place_groups
from towline.jobs.slurm.profile import ClusterProfile
from towline.jobs.slurm.srun import SrunLauncher
from towline.jobs.supervisor import Outcome, supervise
from towline.storage.errors import BudgetReached, RunStopped, SlurmError, TowlineError
from towline.storage.run_directory import RunDirectory, read_jsonl


@dataclass(frozen=True, slots=True)
class BatchStep:
    """
    Args:
        folder: of the run.
        submission: which `towline submit` or `resume` of the run this is, from 0.
    """

    folder: str
    submission: int
    is_smoke: bool = False

    def __call__(self) -> dict[str, Any]:
        """
        Returns:
            How the run ended: "status", "next_step", "run"; "job" if it goes on in that one.

        Raises:
            RunFault: a process failed or stalled.
            BudgetReached: the node-hours of the run are used up.
            RunStopped: the run was told to stop, or would go on in vain.
        """
        run = RunDirectory.open(Path(self.folder))
        job = os.environ["SLURM_JOB_ID"]
        deadline = Deadline(ask_end=lambda: allocation.time_limit_end(job), is_in_job=True)
        with deadline.noting_signals():
            try:
                return self._attempt(run, job, deadline)
            except TowlineError as error:
                if run.read_state().get("status") in ("queued", "requeued", "continued"):
                    run.write_state(status="failed", ended=time.time(), fault=str(error))
                raise

    def _attempt(self, run: RunDirectory, job: str, deadline: Deadline) -> dict[str, Any]:
        profile = ClusterProfile.model_validate_json(run.cluster.read_text())
        experiment = recorded_experiment(run.config.read_text())
        nodes, hosts, book = experiment.nodes or TrainerNodesConfig(), allocation.hosts_of(os.environ), AttemptBook(run)
        groups = place_groups(profile, nodes, os.environ, is_smoke=self.is_smoke)
        self._note_job(run, job, groups)
        self._note_failed_nodes(book)
        self._refuse_what_is_in_vain(run, book, nodes, len(hosts))

        continuation = Continuation(run, profile.continue_, job, book.unreliable_nodes)
        if (successor := continuation.prepare()) is not None:
            self._note_job(run, successor, {})
        if (left_s := book.left_s(nodes.max_node_hours, len(hosts))) is not None:
            deadline.budget_end = time.time() + left_s
        launcher = SrunLauncher(profile, groups, run.code)
        deadline.step_s, deadline.save_s = book.measured()
        log = BatchLog(
            run, book, deadline, num_steps=experiment.steps, job=job, submission=self.submission, nodes=hosts
        )
        try:
            outcome = supervise(run, experiment, log, launcher=launcher, deadline=deadline)
        except TowlineError:
            if deadline.is_being_ended:
                # Not a fault: it will start again, or its successor goes on.
                log.end("preempted")
                continuation.leave()
            lost = _lost_nodes(launcher, hosts)
            log.end("node lost" if lost else "failed", failed_nodes=lost)
            launcher.clear_nodes()
            if lost and continuation.is_possible:
                # Slurm kept the job, and the trainer cannot do without the node.
                return self._continued(run, continuation.go_on())
            continuation.give_up()
            raise
        log.end(outcome.why or outcome.status, failed_nodes=launcher.lost)
        launcher.clear_nodes()
        if outcome.why in ("limit", "preempted") and outcome.status == "stopped" and continuation.is_possible:
            if deadline.is_being_ended and _is_being_taken(job):
                # Slurm starts a preempted job again by itself, and a cancelled one must stay so.
                continuation.leave()
            return self._continued(run, continuation.go_on())
        continuation.give_up()
        return self._ended(run, outcome, book)

    def checkpoint(self) -> Any:
        """For submitit, should Slurm's signal come before the supervisor listens: nothing is lost, start again."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def _continued(self, run: RunDirectory, job: str) -> dict[str, Any]:
        self._note_job(run, job, {})
        return {"status": "continued", "run": self.folder, "job": job}

    def _ended(self, run: RunDirectory, outcome: Outcome, book: AttemptBook) -> dict[str, Any]:
        if outcome.status == "done":
            return {"status": "done", "run": self.folder, "next_step": outcome.next_step}
        kept = f"{run.root.name} stopped at step {outcome.next_step} with checkpoint {outcome.next_step} kept"
        if outcome.why == "budget":
            raise BudgetReached(f"{kept}: {_budget_words(run, book)}")
        raise RunStopped(f"{kept} ({outcome.why}).\n  next    towline resume {run.root}")

    def _note_job(self, run: RunDirectory, job: str, groups: Mapping[str, Place]) -> None:
        """A script that was handed to sbatch by hand, and a successor, are noted here."""
        if job in [row["job"] for row in read_jsonl(run.submissions)]:
            return
        row: dict[str, Any] = {"job": job, "submission": self.submission, "submitted": time.time()}
        components = {name: f"{job}+{place.het_group}" for name, place in groups.items() if place.het_group is not None}
        with run.submissions.open("a") as file:
            file.write(json.dumps({**row, "smoke": self.is_smoke, "components": components or {"trainer": job}}) + "\n")

    def _note_failed_nodes(self, book: AttemptBook) -> None:
        """An attempt that was killed cannot say which node failed; the next one asks Slurm."""
        of_this = [row for row in book.rows() if row.submission == self.submission]
        if of_this and of_this[-1].outcome in ("", "preempted"):
            row = of_this[-1]
            try:
                book.note_failed_nodes(row.number, allocation.nodes_that_failed(row.nodes, row.began))
            except SlurmError as error:
                print(f"! which nodes failed in attempt {row.number} is not known: {error}", flush=True)

    def _refuse_what_is_in_vain(
        self, run: RunDirectory, book: AttemptBook, nodes: TrainerNodesConfig, num_nodes: int
    ) -> None:
        left_s = book.left_s(nodes.max_node_hours, num_nodes)
        if left_s is not None and left_s < MIN_LEFT_S:
            refusal: TowlineError = BudgetReached(f"{run.root.name}: {_budget_words(run, book)}")
        elif book.in_vain(self.submission) >= MAX_IN_VAIN:
            refusal = RunStopped(
                f"{run.root.name}: {MAX_IN_VAIN} attempts in a row ended without a new checkpoint; another would be in "
                f"vain. Look at {run.root / 'logs'}; a longer time limit or a smaller trainer.checkpoint_every may be "
                f"what it needs. Then: towline resume {run.root}"
            )
        else:
            return
        run.write_state(status="stopped", ended=time.time(), fault=str(refusal))
        raise refusal


def _budget_words(run: RunDirectory, book: AttemptBook) -> str:
    return (
        f"{book.node_hours():.3g} node-hours are used, as nodes.max_node_hours allows. More: "
        f"towline resume {run.root} -o nodes.max_node_hours=HOURS"
    )


def _is_being_taken(job: str) -> bool:
    """Not as far as is known, where the controller is away: a requeue that it refuses is told with the way on."""
    try:
        return allocation.is_being_taken(job)
    except SlurmError as error:
        print(f"! why the job is being ended is not known: {error}", flush=True)
        return False


def _lost_nodes(launcher: SrunLauncher, hosts: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple({*launcher.lost, *allocation.lost_nodes(hosts)})
    except SlurmError:
        return tuple(launcher.lost)
