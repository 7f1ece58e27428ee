import pytest

from towline.launcher.check import report_lines
from towline.launcher.cli import command


def report(project, *overrides: str) -> list[str]:
    return list(report_lines(project.read(*overrides)[1], project.look(*overrides)))


def test_the_report_shows_model_data_rewards_and_plan(project) -> None:
    lines = report(project)
    assert lines[0] == f"model   {project.model}   320 parameters, 2 layers, context 32 tokens"
    assert lines[1].startswith("data    train   3 prompts, 0 of them again, 0 rows rejected")
    assert lines[2] == "        tokens: 2 median, 2 p95, 2 max"
    assert lines[3:5] == ["        row 0, answer a b", "          | a b"]
    assert "reward  exact_match   weight 1" in lines
    text = "\n".join(lines)
    assert "trainer 1 rank   state 5.00 KiB a rank (weights 640 B, gradients 640 B, master 1.25 KiB" in text
    assert "= 33,554,432 tokens of 32 B" in text
    assert "free   fits" in text
    assert lines[-1] == "nothing wrong was found"


def test_rejected_rows_are_shown_by_line_beside_the_good_ones(project) -> None:
    with (project.folder / "train.jsonl").open("a") as file:
        file.write("{}\n")
    text = "\n".join(report(project))
    assert "data    train   3 prompts, 0 of them again, 1 rows rejected" in text
    assert 'train.jsonl:4: field "prompt" is missing' in text
    assert text.endswith("1 problem, 0 warnings")


def test_a_run_that_is_too_big_is_said_not_to_fit(project) -> None:
    lines = report(project, "steps=1000000000000")
    assert any("disk" in line and line.endswith("does not fit") for line in lines)


def test_check_lists_all_problems_and_exits_with_2(project, capsys: pytest.CaptureFixture[str]) -> None:
    (project.model / "model.safetensors").unlink()
    (project.folder / "held_out.jsonl").unlink()
    assert command(["check", str(project.file)]) == 2
    text = capsys.readouterr().out
    assert text.count("FAILED  ") == 2
    assert not project.runs.exists()
