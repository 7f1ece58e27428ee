"""The book of a run's attempts: node-hours, attempts in vain, nodes that fail."""

import os
from pathlib import Path

import pytest

from towline.jobs.slurm import attempts as module
from towline.jobs.slurm.attempts import AttemptBook
from towline.storage.run_directory import RunDirectory


class Clock:
    now = 1000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def book(tmp_path: Path) -> AttemptBook:
    return AttemptBook(RunDirectory.create(tmp_path / "run"))


def attempt(book: AttemptBook, number: int, *, submission: int = 0, nodes: tuple[str, ...] = ("n1", "n2")) -> None:
    book.run.logs(number).mkdir(parents=True)
    book.begin(number, "12", submission, nodes)


def checkpoint(book: AttemptBook, step: int) -> None:
    folder = book.run.checkpoints / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "complete.json").write_text("{}")


def test_node_hours_are_nodes_times_hours_of_all_attempts(book: AttemptBook, clock: Clock):
    attempt(book, 0)
    clock.now += 1800
    book.end(0, "limit")
    attempt(book, 1, nodes=("n1", "n2", "n3", "n4"))
    clock.now += 900
    book.end(1, "done")
    assert book.node_hours() == 2 * 0.5 + 4 * 0.25
    assert book.num_timeouts() == 1


def test_an_attempt_that_was_killed_counts_until_its_last_sign_of_life(book: AttemptBook, clock: Clock):
    attempt(book, 0)
    alive = book.run.logs(0) / "alive"
    os.utime(alive, (1360.0, 1360.0))
    (row,) = book.rows()
    assert (row.outcome, row.ended) == ("", 1360.0)
    assert book.node_hours() == 2 * 0.1


def test_attempts_are_in_vain_until_one_leaves_a_checkpoint(book: AttemptBook, clock: Clock):
    attempt(book, 0)
    assert book.in_vain(0) == 1
    attempt(book, 1)
    assert book.in_vain(0) == 2
    checkpoint(book, 5)
    assert book.in_vain(0) == 0
    attempt(book, 2)
    assert book.in_vain(0) == 1
    attempt(book, 3)
    assert book.in_vain(0) == 2


def test_a_new_submission_has_its_own_two_attempts(book: AttemptBook, clock: Clock):
    attempt(book, 0)
    attempt(book, 1)
    assert (book.in_vain(0), book.in_vain(1)) == (2, 0)


def test_a_node_that_failed_twice_is_not_asked_for_again(book: AttemptBook, clock: Clock):
    attempt(book, 0)
    book.note_failed_nodes(0, ["n2"])
    book.note_failed_nodes(0, ["n2"])
    assert book.unreliable_nodes() == ()
    attempt(book, 1)
    book.note_failed_nodes(1, ["n1", "n2"])
    assert book.unreliable_nodes() == ("n2",)


def test_a_row_has_what_its_attempt_had(book: AttemptBook, clock: Clock):
    checkpoint(book, 3)
    attempt(book, 4, submission=1)
    book.end(4, "preempted")
    (row,) = book.rows()
    assert (row.number, row.job, row.submission, row.nodes) == (4, "12", 1, ("n1", "n2"))
    assert (row.began, row.ended, row.outcome, row.checkpoint) == (1000.0, 1000.0, "preempted", 3)


def test_what_an_attempt_measured_is_known_to_the_next(book: AttemptBook, clock: Clock):
    assert book.measured() == (0.0, 0.0)
    attempt(book, 0)
    book.end(0, "limit", step_s=12.5, save_s=30.0)
    attempt(book, 1)
    book.end(1, "limit")  # it came no further than its start
    assert book.measured() == (12.5, 30.0)
