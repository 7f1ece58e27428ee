"""What the batch step's log says while a run goes on, and the book of its attempts."""

import time
from collections.abc import Sequence
from typing import Any

from towline.jobs.deadline import Deadline
from towline.jobs.slurm.attempts import AttemptBook
from towline.jobs.step_lines import evaluation_line, step_line
from towline.storage.run_directory import RunDirectory


class BatchLog:
    """An `Observer` of the supervisor."""

    def __init__(
        self,
        run: RunDirectory,
        book: AttemptBook,
        deadline: Deadline,
        *,
        num_steps: int,
        job: str,
        submission: int,
        nodes: Sequence[str],
    ) -> None:
        self._run, self._book, self._deadline, self._num_steps = run, book, deadline, num_steps
        self._job, self._submission, self._nodes = job, submission, nodes
        self._attempt: int | None = None

    def on_attempt(self, number: int) -> None:
        self._attempt = number
        self._book.begin(number, self._job, self._submission, self._nodes)
        _say(f"run {self._run.root}   attempt {number}   job {self._job} on {' '.join(self._nodes)}")

    def on_phases(self, phases: dict[str, str]) -> None:
        assert self._attempt is not None
        self._book.alive(self._attempt)

    def on_step(self, row: dict[str, Any]) -> None:
        _say(step_line(row, self._num_steps))

    def on_evaluation(self, row: dict[str, Any]) -> None:
        _say(evaluation_line(row))

    def on_event(self, text: str) -> None:
        _say(f"! {text}")

    def end(self, outcome: str, failed_nodes: Sequence[str] = ()) -> None:
        if self._attempt is not None:
            try:
                if failed_nodes:
                    self._book.note_failed_nodes(self._attempt, failed_nodes)
                self._book.end(self._attempt, outcome, step_s=self._deadline.step_s, save_s=self._deadline.save_s)
            except OSError as error:  # a full disk may be what ended the run: its own fault is told next
                _say(f"! the end of attempt {self._attempt} could not be written down: {error}")
        _say(f"attempt ended: {outcome}{' ' if failed_nodes else ''}{' '.join(failed_nodes)}")


def _say(line: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)
