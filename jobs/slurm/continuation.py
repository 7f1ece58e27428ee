"""How a run goes on after its job's end: in the same job, requeued; in a successor; or not by itself. No torch."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from towline.jobs.slurm import allocation
from towline.jobs.slurm.environment import own_script, requeue_leader
from towline.storage.errors import RunStopped, SlurmError
from towline.storage.run_directory import RunDirectory


@dataclass(slots=True)
class Continuation:
    """
    Args:
        unreliable_nodes: asked when the next job is asked for: it gets none of them.
    """

    run: RunDirectory
    how: Literal["requeue", "resubmit", "off"]
    job: str
    unreliable_nodes: Callable[[], Sequence[str]]
    successor: str | None = field(default=None, init=False)

    def prepare(self) -> str | None:
        """A successor is handed in while this job runs: should the node with this process die, it is there already."""
        if self.how == "resubmit":
            self._submit_successor()
        return self.successor

    @property
    def is_possible(self) -> bool:
        return self.how != "off"

    def go_on(self) -> str:
        """The successor's id. A job that is requeued does not return: Slurm ends this process and starts it again.

        Raises:
            RunStopped: Slurm refuses; nothing is lost.
        """
        if self.successor is None:
            self.run.write_state(status="requeued")
            try:
                requeue_leader(self.job)
            except SlurmError as refusal:
                self._submit_instead(refusal)
            else:
                self._exclude(self.job)
                self.leave()
        assert self.successor is not None
        self.run.write_state(status="continued", job=self.successor)
        return self.successor

    def _submit_instead(self, refusal: SlurmError) -> None:
        """Sites may forbid a requeue. Should Slurm have done it all the same, the successor waits for that end."""
        cannot = f"{self.run.root.name} cannot requeue itself: {refusal}"
        try:
            self._submit_successor()
        except SlurmError as error:
            stopped = RunStopped(f"{cannot}\n{error}\n  Nothing is lost. Next: towline resume {self.run.root}")
            self.run.write_state(status="stopped", ended=time.time(), fault=str(stopped))
            raise stopped from error
        print(f'! {cannot}\n  Its successor {self.successor} goes on, as with continue = "resubmit".', flush=True)

    def _submit_successor(self) -> None:
        self.successor = allocation.submit_successor(own_script(), self.job)
        self._exclude(self.successor)

    def _exclude(self, job: str) -> None:
        """To go on with a bad node is better than not to."""
        if nodes := self.unreliable_nodes():
            try:
                allocation.exclude_nodes(job, nodes)
            except SlurmError as error:
                print(f"! job {job} may get {' '.join(nodes)} again, which failed twice: {error}", flush=True)

    def leave(self) -> None:
        """Does not return. Slurm takes this job away and knows why: a result of this process would be taken for the
        run's, and to wait for the kill would keep the nodes."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    def give_up(self) -> None:
        """The run is done, or failed: nothing is to follow."""
        if self.successor is not None:
            try:
                allocation.cancel(self.successor)
            except SlurmError as error:
                # The caller is about to say how the run ended, which matters more.
                print(f"! cancel the queued successor by hand, scancel {self.successor}: {error}", flush=True)
            self.successor = None
