"""What Slurm says of a job's start, in words."""

import time
from datetime import datetime, timedelta

import pytest

from fake_slurm import FakeSlurm
from towline.launcher.start_estimate import start_estimate, start_time, when

NOW = datetime(2026, 1, 30, 12, 0)


@pytest.fixture(autouse=True)
def _noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", NOW.timestamp)


def test_the_component_that_starts_last_says_when(slurm: FakeSlurm) -> None:
    slurm.answers("squeue", "2026-01-30T14:20:00", "2026-01-30T14:05:00")
    assert start_estimate("12") == "earliest start 14:20 today (Slurm's estimate)"
    assert slurm.calls("squeue") == ["--noheader --jobs=12 --format=%S"]


@pytest.mark.parametrize("rows", [["N/A", "N/A"], ["2026-01-30T14:20:00", "N/A"], []])
def test_without_an_answer_for_each_there_is_no_estimate(rows: list[str], slurm: FakeSlurm) -> None:
    slurm.answers("squeue", *rows)
    assert start_time("12") is None
    assert start_estimate("12") == "no estimate of the start yet"


def test_a_job_that_squeue_does_not_know_has_none(slurm: FakeSlurm) -> None:
    slurm.fails("squeue", "slurm_load_jobs error: Invalid job id specified")
    assert start_estimate("12") == "no estimate of the start yet"


@pytest.mark.parametrize(
    ("later", "words"),
    [
        (timedelta(minutes=5), "12:05 today"),
        (timedelta(hours=12), "00:00 tomorrow"),
        (timedelta(hours=35, minutes=59), "23:59 tomorrow"),
        (timedelta(days=3), "Mon 02 Feb, 12:00"),
    ],
)
def test_a_moment_is_told_as_one_would(later: timedelta, words: str) -> None:
    assert when((NOW + later).timestamp()) == words
