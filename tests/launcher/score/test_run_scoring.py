"""Of the run in conftest.py: three steps, one shard each, four completions `completion N of step S` a shard."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from towline.launcher.cli import command
from towline.storage import ledger
from towline.storage.ledger import read_scores, sealed_chunks, sealed_steps
from towline.storage.publish import leftovers
from towline.storage.run_directory import RunDirectory
from towline.storage.set_aside import list_aside

REWARDS = '[[rewards]]\nuse = "by_number.py:grade"\nname = "exact_match"\nweight = 2.0\n'
GRADE = """
import os, signal
from pathlib import Path


FATAL = Path(__file__).with_name("fatal")

def parent_of(pid):
    return int(Path(f"/proc/{pid}/status").read_text().split("PPid:")[1].split()[0])

def grade(completion, gold):
    words = completion.split()
    if FATAL.exists() and completion.startswith("completion 2 of step 1"):
        os.kill(parent_of(os.getppid()), signal.SIGKILL)  # the worker's parent is its template
    return float(int(words[1]) >= 2)
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    (tmp_path / "by_number.py").write_text(GRADE)
    (tmp_path / "rewards.toml").write_text(REWARDS)
    return tmp_path / "rewards.toml"


def sealed(run: RunDirectory) -> dict[str, str]:
    """Every file of the ledger with a digest of its content."""
    files = [path for path in run.rollouts.rglob("*") if path.is_file()]
    return {str(path.relative_to(run.rollouts)): hashlib.blake2b(path.read_bytes()).hexdigest() for path in files}


def again(run: RunDirectory) -> dict[int, Path]:
    """Step → its second file of scores, where it has one."""
    found = {
        step: list(sealed_chunks(run.rollouts, step)[0].parent.glob("chunk-000.scores-*.h5"))
        for step in sealed_steps(run.rollouts)
    }
    return {step: files[0] for step, files in found.items() if files}


def name_of(second: Path) -> str:
    return second.name.removeprefix("chunk-000.scores-").removesuffix(".h5")


def score(run: RunDirectory, *arguments: object, code: int = 0) -> int:
    assert command(["score", str(run.root), *map(str, arguments), "--workers", "1"]) == code
    return code


def test_a_second_file_of_scores_lies_beside_each_shard_and_the_first_stay(
    run: RunDirectory, rewards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sealed(run)
    score(run, "--rewards", rewards)
    lines = capsys.readouterr().out.splitlines()
    after = sealed(run)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 3
    (name,) = {name_of(path) for path in again(run).values()}
    assert lines[0].startswith("small-1   3 shards scored again   12 completions")
    assert lines[-1].startswith(f"written   rollouts/*/*/chunk-*.scores-{name}.h5;")
    for step in range(3):
        (shard,) = sealed_chunks(run.rollouts, step)
        sheet = read_scores(shard, name)
        assert [one.total for one in sheet.scores] == [0.0, 0.0, 2.0, 2.0]
        assert (sheet.weights, sheet.shard_digest) == ({"exact_match": 2.0}, read_scores(shard).shard_digest)


def test_disagreements_with_the_first_scores_are_counted_and_shown(
    run: RunDirectory, rewards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First 0 1 1 1, in step 2 the last failed; now 0 0 1 1, of which the total is twice as much."""
    score(run, "--rewards", rewards)
    text = capsys.readouterr().out
    found = text.partition("against the earlier scores\n")[2].splitlines()
    assert found[:5] == [
        "  exact_match   4 of 12 differ (33.33%)",
        "    step 0 row 0 sample 1   1 → 0",
        "    step 1 row 0 sample 1   1 → 0",
        "    step 2 row 0 sample 1   1 → 0",
        "  total   9 of 12 differ (75.00%)",
    ]


def test_what_is_scored_is_not_scored_again(
    run: RunDirectory, rewards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score(run, "--rewards", rewards)
    first, files = capsys.readouterr().out.splitlines(), sealed(run)
    score(run, "--rewards", rewards)
    second = capsys.readouterr().out.splitlines()
    assert sealed(run) == files
    assert second[0].startswith("small-1   0 shards scored again, 3 were before   12 completions")
    assert [line for line in second if "differ" in line] == [line for line in first if "differ" in line]


@pytest.mark.parametrize("change", ["weight", "code", "limit", "memory"])
def test_another_scoring_has_files_of_its_own(run: RunDirectory, rewards: Path, change: str) -> None:
    score(run, "--rewards", rewards)
    if change == "weight":
        rewards.write_text(REWARDS.replace("2.0", "3.0"))
    elif change == "code":
        rewards.with_name("by_number.py").write_text(GRADE + "\n# other\n")
    elif change == "memory":
        rewards.write_text(f"{REWARDS}[scoring]\nmemory_gib = 3.0\n")
    score(run, "--rewards", rewards, *(["--limit-s", "7"] if change == "limit" else []))
    assert len(list(run.rollouts.glob("*/*/chunk-000.scores-*.h5"))) == 6


def test_without_rewards_the_run_s_own_are_used(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    score(run)
    assert "its own rewards" in capsys.readouterr().out
    assert [one.total for one in read_scores(sealed_chunks(run.rollouts, 0)[0], name_of(again(run)[0])).scores] == [
        0.0
    ] * 4


def test_a_scoring_killed_in_the_middle_goes_on_where_it_was(
    run: RunDirectory, rewards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sealed(run)
    rewards.with_name("fatal").touch()
    command_line = [
        sys.executable,
        "-P",
        "-m",
        "towline.launcher.cli",
        "score",
        str(run.root),
        "--rewards",
        str(rewards),
    ]
    killed = subprocess.run([*command_line, "--workers", "1"], env=os.environ, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list(again(run)) == [0]
    assert {name: digest for name, digest in sealed(run).items() if name in before} == before
    assert leftovers(run.rollouts) == []
    assert command(["ledger", str(run.root)]) == 0
    rewards.with_name("fatal").unlink()
    kept = again(run)[0].read_bytes()
    capsys.readouterr()
    score(run, "--rewards", rewards)
    assert capsys.readouterr().out.startswith("small-1   2 shards scored again, 1 were before   12 completions")
    assert list(again(run)) == [0, 1, 2]
    assert again(run)[0].read_bytes() == kept


def test_scores_that_are_damaged_or_of_another_shard_are_set_aside_and_given_again(
    run: RunDirectory, rewards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    score(run, "--rewards", rewards)
    good = sealed(run)
    seconds = again(run)
    seconds[0].write_bytes(seconds[0].read_bytes()[:-10])
    shutil.copyfile(seconds[2], seconds[1])
    capsys.readouterr()
    score(run, "--rewards", rewards)
    assert capsys.readouterr().out.startswith("small-1   2 shards scored again, 1 were before")
    reasons = [entry.reason for entry in list_aside(run)]
    assert len(reasons) == 2
    assert "is torn or damaged" in reasons[0]
    assert reasons[1] == "given to another shard"
    assert sealed(run).keys() == good.keys()
    name = name_of(seconds[0])
    assert [len(read_scores(sealed_chunks(run.rollouts, step)[0], name).scores) for step in range(3)] == [4, 4, 4]


def test_a_damaged_shard_is_named_and_the_others_scored(
    run: RunDirectory, rewards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.rollouts.joinpath("step-000001/wave-0/chunk-000.h5").write_bytes(b"nothing")
    score(run, "--rewards", rewards, code=1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("small-1   2 shards scored again   8 completions")
    assert lines[-1].startswith("DAMAGED   rollouts/step-000001/wave-0/chunk-000.h5: is torn or damaged")


def test_more_failures_than_the_rewards_allow_end_with_exit_code_1(
    run: RunDirectory, rewards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of twelve, also where the scores are there from before; a run's default is 10 %."""
    rewards.with_name("by_number.py").write_text(GRADE.replace("words = ", "1 / (' 2 of' not in completion); words = "))
    for _ in range(2):
        score(run, "--rewards", rewards, code=1)
        told = "FAILED    25.00% of the completions could not be scored, and scoring.max_failed allows 10%"
        assert capsys.readouterr().out.splitlines()[-1] == told
    rewards.write_text(f"{REWARDS}[scoring]\nmax_failed = 0.25\n")
    score(run, "--rewards", rewards)


def test_a_run_that_clears_up_meanwhile_costs_nothing(
    run: RunDirectory, rewards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that begins or ends removes half-written files of its ledger."""
    write, cleared = ledger.write_columns, []

    def write_and_clear(path: Path, *arguments):
        digest = write(path, *arguments)
        if not cleared:
            path.unlink()
            cleared.append(path)
        return digest

    monkeypatch.setattr(ledger, "write_columns", write_and_clear)
    score(run, "--rewards", rewards)
    assert len(cleared) == 1
    assert list(again(run)) == [0, 1, 2]


def test_options_of_files_are_refused_for_a_run(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--output", "x.jsonl"), ("--fields", "answer=a"), ("--compare", "x")):
        score(run, option, value, code=2)
        assert capsys.readouterr().err.startswith(f"{option} is for a file of completions")


def test_a_run_without_rollouts_is_said_to_be_one(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run.rollouts)
    score(run, code=2)
    assert capsys.readouterr().err == "small-1 has no sealed rollouts yet.\n"
