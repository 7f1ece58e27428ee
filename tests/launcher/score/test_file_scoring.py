import io
import json
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest

LINES = (
    {"completion": r"so \boxed{7}", "answer": "7", "id": "right"},
    {"completion": r"so \boxed{8}", "answer": "7", "id": "wrong"},
    {"completion": "raise", "answer": "7", "id": "raises"},
    {"completion": "loop", "answer": 7, "id": "hangs"},
)


def row(text: str, name: str) -> list[str]:
    """The cells of one row of the table."""
    return next(line.split() for line in text.splitlines() if line.split()[:1] == [name])


def section(text: str, title: str) -> list[str]:
    """The indented lines below a title."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(title))
    rest = lines[start + 1 :]
    return rest[: next((number for number, line in enumerate(rest) if not line.startswith("  ")), len(rest))]


def test_each_part_has_its_mean_failures_and_times(desk) -> None:
    text = desk.score(desk.write("a.jsonl", *LINES))
    assert text.startswith("a.jsonl   4 completions of 4 lines\nrewards   rewards.toml, code ")
    assert "\n          1.0 · math_answer + 0.5 · own\n" in text
    # part, weight, mean, share above 0, failed, timed out
    assert row(text, "math_answer")[:6] == ["math_answer", "1", "0.3333", "33.3%", "0", "1"]
    assert row(text, "own")[:6] == ["own", "0.5", "0.5000", "50.0%", "1", "1"]
    assert row(text, "total")[:5] == ["total", "0.7500", "50.0%", "1", "1"]
    slowest, unit = row(text, "total")[-2:]
    assert float(slowest) * {"s": 1, "ms": 0.001}[unit] >= 0.5
    (raised, hung) = section(text, "failed    2 of 4 (50.00%)")
    assert raised.startswith(
        "  a.jsonl:3   own failed: math_answer: no boxed answer; own: ValueError: no such answer at "
    )
    assert raised.endswith(f"{desk.folder / 'own.py'}:6")
    assert hung == "  a.jsonl:4   math_answer, own timed out: own: no answer within 0.5 s"
    assert "a.jsonl:4" in section(text, "slowest")[0]
    assert section(text, "highest")[0] == r"  1.5   a.jsonl:1   gold 7   > so \boxed{7}"
    assert section(text, "lowest")[0] == r"  0   a.jsonl:2   gold 7   > so \boxed{8}"


def test_each_line_gets_its_scores_and_what_failed_is_null(desk, read_json) -> None:
    out = desk.folder / "out.jsonl"
    desk.score(desk.write("a.jsonl", *LINES), "--output", out)
    rows = read_json(out)
    assert [{key: one[key] for key in one if key != "towline_score"} for one in rows] == list(LINES)
    scores = [one["towline_score"] for one in rows]
    assert [score["total"] for score in scores] == [1.5, 0.0, None, None]
    assert [score["status"] for score in scores] == ["ok", "ok", "failed", "timeout"]
    assert [score["parts"]["math_answer"]["value"] for score in scores] == [1.0, 0.0, 0.0, None]
    assert [score["parts"]["own"]["value"] for score in scores] == [1.0, 0.0, None, None]
    assert [score["parts"]["own"]["status"] for score in scores] == ["ok", "ok", "failed", "timeout"]
    assert [score["parts"]["own"]["weight"] for score in scores] == [0.5] * 4
    assert "ValueError: no such answer" in scores[2]["detail"]
    assert scores[3]["seconds"] >= 0.5
    assert scores[3]["parts"]["math_answer"]["seconds"] is None
    assert scores[3]["parts"]["own"]["seconds"] >= 0.5
    assert len({score["code_hash"] for score in scores}) == 1


def test_several_completions_of_a_line_have_a_score_each(desk, read_json) -> None:
    out = desk.folder / "out.jsonl"
    line = {"responses": [r"\boxed{7}", "raise", r"\boxed{8}"], "gold": "7"}
    text = desk.score(
        desk.write("a.jsonl", line, line | {"responses": []} | {"responses": [r"\boxed{7}"]}), "--output", out
    )
    assert "4 completions of 2 lines" in text
    assert "a.jsonl:1[1]   own failed" in text
    # Means of lines 0.75 (of 1.5 and 0) and 1.5; mean of all three 1.0; residuals -0.5 and 0.5 with G / (G - 1) = 2.
    half = 1.959963984540054 * math.sqrt(2 * 0.5) / 3
    assert f"total     1.000 ({1 - half:.3f} to {1 + half:.3f}), 95 % interval over 2 prompts" in text
    assert [[score["total"] for score in row["towline_score"]] for row in read_json(out)] == [[1.5, None, 0.0], [1.5]]


def test_what_an_earlier_scoring_wrote_is_compared(desk, read_json) -> None:
    out = desk.folder / "out.jsonl"
    desk.score(desk.write("a.jsonl", *LINES[:3]), "--output", out)
    text = desk.score(out)
    assert section(text, "against the earlier scores") == [
        "  math_answer   0 of 3 differ (0.00%)", "  own   0 of 3 differ (0.00%)", "  total   0 of 3 differ (0.00%)",
    ]  # fmt: skip
    rows = read_json(out)
    rows[0]["towline_score"]["parts"]["own"]["value"] = 0.25
    rows[1]["towline_score"]["parts"]["own"]["value"] = None
    rows[2]["towline_score"]["parts"]["own"]["value"] = 1.0
    text = desk.score(desk.write("b.jsonl", *rows, {"completion": "7", "answer": "7"}))
    assert section(text, "against the earlier scores") == [
        "  math_answer   0 of 3 differ (0.00%)",
        "  own   3 of 3 differ (100.00%)",
        "    b.jsonl:1   0.25 → 1",
        "    b.jsonl:2   failed → 0",
        "    b.jsonl:3   1 → failed",
        "  total   0 of 3 differ (0.00%)",
        "  1 completions have no earlier score",
    ]


def test_a_field_of_other_scores_can_be_compared(desk) -> None:
    lines = [line | {"reward": reward} for line, reward in zip(LINES, (1.5, True, 0.0), strict=False)]
    text = desk.score(desk.write("a.jsonl", *lines), "--compare", "reward")
    assert section(text, "against the earlier scores") == [
        "  total   2 of 3 differ (66.67%)", "    a.jsonl:2   1 → 0", "    a.jsonl:3   0 → failed",
    ]  # fmt: skip
    assert 'no line has a score in field "points"' in desk.score("a.jsonl", "--compare", "points", code=2)


def test_standard_input_is_read(desk, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = "".join(json.dumps(line) + "\n" for line in LINES[:2]).encode()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(raw)))
    text = desk.score("-")
    assert text.startswith("standard input   2 completions of 2 lines")
    assert "stdin:1" in text


def test_bad_lines_are_all_named_before_anything_is_scored(desk) -> None:
    (desk.folder / "own.py").write_text("open('ran', 'w')\ndef grade(completion, gold): return 1.0\n")
    bad = ["nonsense", {"completion": 3, "answer": "1"}, {"answer": "1"}, {"completion": "", "answer": " "}]
    path = desk.write("a.jsonl", LINES[0], *bad, LINES[1])
    assert desk.score(path, "--output", "out.jsonl", code=2).splitlines() == [
        f"{path}: 4 rows cannot be used",
        "  a.jsonl:2: not JSON at column 1: Expecting value",
        '  a.jsonl:3: field "completion" is a number; expected a string, a chat, or a list of them',
        '  a.jsonl:4: field "completion" is missing; the row has: answer. Name it: --fields completion=FIELD',
        '  a.jsonl:5: field "answer" is empty',
    ]
    assert desk.files() == ["a.jsonl", "own.py", "rewards.toml"]


def test_an_output_that_exists_stays_as_it_is(desk) -> None:
    kept = desk.write("kept.jsonl", "kept")
    said = desk.score(desk.write("a.jsonl", LINES[0]), "--output", kept, code=2)
    assert said == f"--output {kept} exists; nothing is overwritten. Choose another name, or remove it.\n"
    assert kept.read_text() == "kept\n"


def test_when_nothing_could_be_scored_the_exit_code_is_1(desk) -> None:
    text = desk.score(desk.write("a.jsonl", LINES[2]), code=1)
    assert row(text, "own")[:5] == ["own", "0.5", "-", "-", "1"]
    assert text.endswith("\nFAILED    no completion could be scored\n")


def test_more_failures_than_the_rewards_allow_are_said_and_the_exit_code_is_1(desk, read_json) -> None:
    """One of three. What was scored is written all the same."""
    path = desk.write("a.jsonl", *LINES[:3])
    told = "FAILED    33.33% of the completions could not be scored, and scoring.max_failed allows "
    allowed = desk.rewards.read_text()
    desk.rewards.write_text(allowed.replace("max_failed = 1.0", "max_failed = 0.33"))
    text = desk.score(path, "--output", "out.jsonl", code=1)
    assert text.splitlines()[-2:] == ["written   out.jsonl", f"{told}33%"]
    assert [line["towline_score"]["total"] for line in read_json(desk.folder / "out.jsonl")] == [1.5, 0.0, None]
    desk.rewards.write_text(allowed.replace("max_failed = 1.0", ""))
    assert desk.score(path, code=1).splitlines()[-1] == f"{told}10%"


def test_as_many_failures_as_the_rewards_allow_are_no_failure(desk) -> None:
    """Three of thirty are 0.1 exactly."""
    desk.rewards.write_text(desk.rewards.read_text().replace("max_failed = 1.0", "max_failed = 0.1"))
    path = desk.write("a.jsonl", *LINES[:1] * 27, *LINES[2:3] * 3)
    assert "FAILED" not in desk.score(path)


def test_memory_of_a_worker_is_as_the_rewards_say(desk) -> None:
    (desk.folder / "own.py").write_text("def grade(completion, gold): return float(len(bytearray(100 * 2**20)) > 0)\n")
    path = desk.write("a.jsonl", LINES[0])
    assert row(desk.score(path), "own")[2] == "1.0000"
    desk.rewards.write_text(desk.rewards.read_text() + "memory_gib = 0.05\n")
    assert "own failed: own: MemoryError" in desk.score(path, code=1)


def test_a_reward_that_does_not_load_is_told_with_its_line(desk) -> None:
    (desk.folder / "own.py").write_text("import nothing_of_this_name\ndef grade(completion, gold): return 1.0\n")
    assert f"at {desk.folder / 'own.py'}:1" in desk.score(desk.write("a.jsonl", LINES[0]), code=2)


def test_a_part_that_counts_tokens_needs_an_experiment_and_a_count(desk, project) -> None:
    table = '\n[[rewards]]\nuse = "overlong"\nweight = 1.0\ncache_tokens = 2\n'
    desk.rewards.write_text('[[rewards]]\nuse = "exact_match"\nweight = 1.0\n' + table)
    path = desk.write("a.jsonl", {"completion": r"\boxed{7}", "answer": "7", "num_tokens": 3})
    assert "give the whole experiment file as --rewards" in desk.score(path, code=2)
    project.file.write_text(project.file.read_text() + table)
    # At most 4 tokens, the last 2 of which cost: 3 tokens are halfway.
    assert row(desk.score(path, "--rewards", project.file), "overlong")[2] == "-0.5000"
    bad = desk.write("b.jsonl", {"completion": "", "answer": "7"})
    assert 'b.jsonl:1: field "num_tokens" is missing' in desk.score(bad, "--rewards", project.file, code=2)


def test_a_reward_model_scores_runs_alone(desk, project) -> None:
    """A text has no token ids, and none are made up."""
    table = '[[rewards]]\nuse = "reward_model"\nname = "liked"\nweight = 1.0\nmodel = "rm"\n'
    desk.rewards.write_text(table)
    path = desk.write("a.jsonl", {"completion": "", "answer": "7"})
    assert "rewards.toml: liked is a reward model and reads token ids" in desk.score(path, code=2)
    project.file.write_text(project.file.read_text() + table)
    assert "small.toml: liked is a reward model" in desk.score("--dry-run", "--rewards", project.file, code=2)


@pytest.mark.parametrize("tokens", ['use = "overlong"\ncache_tokens = 5', 'use = "length"\ntarget_tokens = 4\n'
                         'converged = { min_reward = 0.9 }\nwhen = { exact_match = 1.0 }'])  # fmt: skip
def test_a_penalty_for_longer_completions_than_there_may_be_is_refused(desk, project, tokens: str) -> None:
    project.file.write_text(project.file.read_text() + f"\n[[rewards]]\nweight = 1.0\n{tokens}\n")
    path = desk.write("a.jsonl", {"completion": "", "answer": "7", "num_tokens": 3})
    said = desk.score(path, "--rewards", project.file, code=2)
    assert "is for longer completions than rollout.max_completion_tokens (4) allows" in said


def test_a_part_may_count_under_a_condition(desk) -> None:
    """Wrong answers do not get the part of 0.5 that right ones get."""
    desk.rewards.write_text(
        desk.rewards.read_text().replace('name = "own"', 'name = "own"\nwhen = { math_answer = 1.0 }')
    )
    text = desk.score(desk.write("a.jsonl", LINES[0], {"completion": r"7 \boxed{8}", "answer": "7"}))
    assert row(text, "own")[2] == "1.0000"
    assert row(text, "total")[1] == "0.7500"
    assert section(text, "highest")[0].startswith("  1.5   a.jsonl:1")
    assert section(text, "lowest")[0].startswith("  0   a.jsonl:2")


def test_a_reader_that_has_seen_enough_is_no_failure(desk) -> None:
    """As in `towline score … | head -1`."""
    path = desk.write("a.jsonl", LINES[0])
    arguments = ["score", str(path), "--rewards", str(desk.rewards), "--workers", "1", "--output", "out.jsonl"]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "towline.launcher.cli", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
    assert (desk.folder / "out.jsonl").is_file()
