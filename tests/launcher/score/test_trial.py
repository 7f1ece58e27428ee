import json

import pytest

from towline.launcher.cli import command
from towline.launcher.score.trial import spread
from towline.storage.run_directory import RunDirectory


def test_what_is_tried_lies_evenly_over_the_whole() -> None:
    assert spread(list(range(5))) == [0, 1, 2, 3, 4]
    assert spread(list(range(71))) == [0, 10, 20, 30, 40, 50, 60, 70]
    assert spread([]) == []


def test_each_verdict_is_shown_and_nothing_is_written(desk) -> None:
    lines = [{"completion": rf"\boxed{{{number}}}", "answer": "0"} for number in range(15)]
    lines[2] = {"completion": "raise", "answer": "0"}
    desk.write("a.jsonl", *lines)
    before = desk.files()
    found = desk.score("a.jsonl", "--dry-run", "--output", "out.jsonl").splitlines()
    assert desk.files() == before
    places = [line.split()[0] for line in found if line.startswith("a.jsonl:")]
    assert places == [f"a.jsonl:{number}" for number in (1, 3, 5, 7, 9, 11, 13, 15)]
    assert found[0].startswith("a.jsonl:1   total 1.5   ")
    assert found[1] == r"  gold 0   > \boxed{0}"
    assert found[2].startswith("  math_answer   1   ok   ")
    assert found[3].startswith("  own   1   ok   ")
    failed = found[found.index(next(line for line in found if line.startswith("a.jsonl:3"))) :]
    assert failed[0].startswith("a.jsonl:3   total -   ")
    assert failed[3].startswith("  own   -   failed   ")
    assert failed[4].endswith(f"own: ValueError: no such answer at {desk.folder / 'own.py'}:6")
    assert found[-2] == "tried     8, of which 1 failed; nothing was written"
    assert ": all completions of a.jsonl, 15, would take " in found[-1]
    assert found[-1].endswith(" with 2 workers")


def test_before_a_run_the_gold_answers_are_completions(desk, project) -> None:
    """exact_match wants a box; a gold answer without one is no box."""
    rows = [{"prompt": str(number), "answer": f"3 + {number}\n#### {3 + number}"} for number in range(3)]
    (project.folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = desk.score("--dry-run", "--rewards", project.file)
    heads = [line.partition("   ")[0] for line in text.splitlines() if line.startswith("train.jsonl row")]
    assert heads[:4] == [
        "train.jsonl row 0, the gold answer itself", "train.jsonl row 0, the gold answer in a box",
        "train.jsonl row 0, nothing", "train.jsonl row 1, the gold answer itself",
    ]  # fmt: skip
    values = [line.split()[1] for line in text.splitlines() if line.startswith("  exact_match   ")]
    assert values == ["0", "1", "0"] * 3
    assert "the completions of a step, 4, would take" in text
    assert not project.runs.exists()


def test_a_plain_file_of_rewards_needs_something_to_try_them_on(desk) -> None:
    assert "is no experiment file, and has no data to try its rewards on" in desk.score("--dry-run", code=2)


def test_rewards_are_tried_on_a_run_s_own_completions(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(run.root.rglob("*"))
    assert command(["score", str(run.root), "--dry-run", "--workers", "1"]) == 0
    text = capsys.readouterr().out
    heads = [line.partition("   ")[0] for line in text.splitlines() if line.startswith("step ")]
    assert heads == ["step 0 row 0 sample 0", "step 1 row 0 sample 1", "step 2 row 1 sample 0"]
    assert ": all completions of small-1, 12, would take " in text
    assert sorted(run.root.rglob("*")) == files


def test_rewards_that_fail_on_everything_exit_with_1(desk) -> None:
    desk.write("a.jsonl", {"completion": "raise", "answer": "0"})
    assert "tried     1, of which 1 failed" in desk.score("a.jsonl", "--dry-run", code=1)
