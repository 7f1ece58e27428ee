"""What a run on given examples says in the end, while it runs, and as a picture."""

import numpy as np
import pytest

from towline.jobs.step_lines import evaluation_line, step_line
from towline.launcher.cli import command
from towline.launcher.example_outcome import draw_loss_curve, outcome_lines
from towline.storage.held_out_values import keep_held_out
from towline.storage.metrics import append_jsonl
from towline.storage.run_directory import RunDirectory, read_jsonl

PNG = b"\x89PNG"


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    """Three steps, and held-out examples of 2, 1 and 1 tokens that became likelier."""
    run = RunDirectory.create(tmp_path / "small")
    for step, nll in enumerate((2.0, 1.5, 1.0)):
        row = {"step": step, "loss/nll": nll, "loss/gradient_norm": 0.5, "loss/learning_rate": 1e-4}
        append_jsonl(run.metrics, row | {"speed/tokens_per_s": 100.0, "seconds/step": 0.25, "version": step + 1})
    for version, sums in ((0, [4.0, 2.0, 3.0]), (3, [2.0, 1.0, 1.0])):
        keep_held_out(run, version, np.array(sums), [2, 1, 1])
        row = {"version": version, "measure": "nll", "estimate": sum(sums) / 4, "low": 0.5, "high": 2.5}
        append_jsonl(run.evaluations, row | {"num_examples": 3, "seconds": 1.0})
    return run


def test_the_difference_of_held_out_examples_is_paired(run) -> None:
    lines = list(outcome_lines(run, read_jsonl(run.metrics)))
    assert lines[0] == "nll       2.0000 → 1.0000"
    # Differences a token: (-2 - 1 - 2) / 4; clusters deviate from it by 0.5, 0.25 and -0.75.
    half = 1.959963984540054 * np.sqrt(3 / 2 * (0.5**2 + 0.25**2 + 0.75**2)) / 4
    assert lines[1] == (
        f"held-out  nll 2.250 → 1.000   difference -1.250 ({-1.25 - half:+.3f} to {-1.25 + half:+.3f}), 3 examples"
    )


def test_a_step_and_an_evaluation_are_a_line_each(run) -> None:
    row = read_jsonl(run.metrics)[0]
    assert step_line(row, 10) == "step  1/10  nll 2.0000  gradient 0.50  rate 1.0e-04  100 tok/s  0.2 s"
    pairs = {"loss/preference": 0.5, "preference/margin": 0.25} | {k: v for k, v in row.items() if k != "loss/nll"}
    assert step_line(pairs, 10).startswith("step  1/10  loss 0.5000  margin 0.250  gradient 0.50")
    assert evaluation_line(read_jsonl(run.evaluations)[1]) == (
        "held-out nll at version 3: 1.000 (0.500 to 2.500) on 3 examples (1.0 s)"
    )


def test_the_picture_is_drawn_with_and_without_held_out_examples(run) -> None:
    draw_loss_curve(run)
    assert run.loss_curve.read_bytes().startswith(PNG)
    run.loss_curve.unlink()
    run.evaluations.unlink()
    draw_loss_curve(run)
    assert run.loss_curve.read_bytes().startswith(PNG)
    run.metrics.unlink()
    run.loss_curve.unlink()
    draw_loss_curve(run)
    assert not run.loss_curve.exists()


@pytest.mark.parametrize("verb", [["samples"], ["replay", "--step", "0"], ["score"]])
def test_verbs_about_rollouts_say_that_there_are_none(project, capsys, verb) -> None:
    from towline.launcher.run import make_run

    text = project.file.read_text()
    keep = text.split("[rollout]")[0].replace('"grpo"', '"sft"') + "[trainer]\nlearning_rate = 1e-4\nbatch_size = 2\n"
    project.file.write_text(keep + '\n[run]\nroot = "runs"\n')
    make_run(*project.read("run.name=taught"))
    assert command([*verb, "taught", "--root", str(project.runs)]) == 2
    assert 'taught has objective = "sft", which learns from given examples' in capsys.readouterr().err
