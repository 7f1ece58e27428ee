import os

import pytest

from towline.launcher import logs
from towline.launcher.cli import command
from towline.storage.run_directory import RunDirectory


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    """Two attempts, of which the second has no log of the scorer yet."""
    run.logs(1).mkdir()
    for attempt, process in ((0, "trainer.0"), (0, "scorer.0"), (1, "trainer.0"), (1, "supervisor")):
        lines = [f"{process} {attempt} line {number}" for number in range(100)]
        run.log(attempt, process).write_text("\n".join(lines) + "\n")
    (run.root / "logs" / "batch.log").write_text("job begins\njob ends\n")
    return run


def show(run: RunDirectory, *arguments: str) -> int:
    return command(["logs", str(run.root), *arguments])


def test_without_a_process_the_logs_are_listed_newest_attempt_first(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        "attempt   1  supervisor   2.04 KiB  supervisor 1 line 99",
        "attempt   1  trainer.0    1.94 KiB  trainer.0 1 line 99",
        "attempt   0  scorer.0     1.85 KiB  scorer.0 0 line 99",
        "attempt   0  trainer.0    1.94 KiB  trainer.0 0 line 99",
        "attempt all  batch            20 B  job ends",
    ]
    assert lines[-2:] == ["job begins", "job ends"]


def test_the_end_of_the_newest_log_of_a_process(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(run, "trainer.0", "-n", "2") == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.startswith("==> trainer.0  attempt 1  ")
    assert lines == ["trainer.0 1 line 98", "trainer.0 1 line 99"]
    assert show(run, "scorer.0") == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.startswith("==> scorer.0  attempt 0  ")
    assert len(lines) == 50


def test_an_attempt_can_be_chosen(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(run, "trainer.0", "--attempt", "0", "-n", "1") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["trainer.0 0 line 99"]
    assert show(run, "trainer.0", "--attempt", "7") == 2
    assert capsys.readouterr().err == "small-1 has no attempt 7. There: 0, 1.\n"


def test_a_wrong_name_is_answered_with_the_nearest(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert show(run, "trainer.1") == 2
    assert capsys.readouterr().err == "small-1 has no log of trainer.1. Did you mean trainer.0?\n"
    assert show(run, "zzz") == 2
    assert capsys.readouterr().err == ("small-1 has no log of zzz. There: batch, scorer.0, supervisor, trainer.0.\n")
    assert show(run, "scorer.0", "--attempt", "1") == 2
    assert "attempt 1 of small-1 has no log of scorer.0." in capsys.readouterr().err


def test_a_run_without_logs_says_so(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (run.root / "logs").rglob("*.log"):
        path.unlink()
    assert show(run) == 2
    assert "small-1 has no logs yet" in capsys.readouterr().err


def test_what_a_model_wrote_does_not_reach_the_terminal(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.log(1, "trainer.0").write_text("a\x1b[31mred\tb\n")
    assert show(run, "trainer.0") == 0
    assert capsys.readouterr().out.splitlines()[1] == "a\\x1b[31mred\tb"


def test_follow_goes_on_in_the_next_attempt_and_ends_with_the_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_state(status="running", host="elsewhere")
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            with run.log(1, "trainer.0").open("a") as log:
                log.write("a whole line\nhalf a ")
        elif looks == 2:
            with run.log(1, "trainer.0").open("a") as log:
                log.write("line\n")
            run.logs(2).mkdir()
            run.log(2, "trainer.0").write_text("of attempt 2\n")
            run.write_state(status="stopped")

    monkeypatch.setattr(logs.time, "sleep", sleep)
    monkeypatch.setattr(logs, "LOOK_EVERY_S", 0.0)
    assert show(run, "trainer.0", "-n", "0", "--follow") == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["a whole line", "half a line"]
    assert lines[4].startswith("==> trainer.0  attempt 2  ")
    assert lines[5:] == ["of attempt 2"]
    assert show(run, "trainer.0", "-n", "0", "--attempt", "1", "--follow") == 0


def test_a_log_that_is_begun_anew_is_read_from_its_beginning(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_state(status="running", host="elsewhere")

    def sleep(seconds: float) -> None:
        os.truncate(run.log(1, "trainer.0"), 0)
        run.log(1, "trainer.0").write_text("new\n")
        run.write_state(status="done")

    monkeypatch.setattr(logs.time, "sleep", sleep)
    monkeypatch.setattr(logs, "LOOK_EVERY_S", 0.0)
    assert show(run, "trainer.0", "-n", "0", "--follow") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["new"]


def test_follow_waits_for_a_log_that_is_to_come_but_not_for_a_wrong_name(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write_state(status="running", host="elsewhere")

    def sleep(seconds: float) -> None:
        run.log(1, "rollout.0").write_text("here\n")
        run.write_state(status="done")

    monkeypatch.setattr(logs.time, "sleep", sleep)
    assert show(run, "rollout.0", "--follow") == 0
    said = capsys.readouterr()
    assert said.err == "small-1 is RUNNING: waiting for the log of rollout.0\n"
    assert said.out.splitlines()[1:] == ["here"]
    run.write_state(status="running")
    assert show(run, "rolout.0", "--follow") == 2
    assert "Did you mean rollout.0?" in capsys.readouterr().err


def test_follow_does_not_wait_for_a_log_of_a_run_that_has_ended(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(run, "rollout.0", "--follow") == 2
    assert "small-1 has no log of rollout.0." in capsys.readouterr().err
