"""What is said of given examples before a run starts."""

import json

import pytest

from towline.launcher.check import report_lines

EXPERIMENT = """\
objective = "{objective}"
steps = 3

[policy]
model = "model"

[data]
train = "train.jsonl"
chat = false

[trainer]
learning_rate = 1e-4
batch_size = 2
precision = "float32"

[evaluation.data]
train = "held_out.jsonl"
chat = false

[run]
root = "runs"
"""
TRAIN = [("a b", " c d"), ("c d", " e f"), ("e f", " a b")]
HELD_OUT = [("x y", " z"), ("y z", " x")]


@pytest.fixture
def examples(project):
    """Rewrites the project for an objective, with rows of prompt and completion or of prompt, chosen and rejected."""

    def written(objective="sft", train=TRAIN, held_out=HELD_OUT):
        project.file.write_text(EXPERIMENT.format(objective=objective))
        names = ("prompt", "completion") if objective == "sft" else ("prompt", "chosen", "rejected")
        for name, rows in (("train", train), ("held_out", held_out)):
            text = "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)
            (project.folder / f"{name}.jsonl").write_text(text)
        return project

    return written


def test_sound_examples_have_neither_problems_nor_warnings(examples) -> None:
    found = examples().look()
    assert (found.problems, found.warnings) == ([], [])
    assert found.train_examples.tokenized.prompt_tokens == [2, 2, 2]
    assert found.train_examples.tokenized.learned_tokens == [3, 3, 3]  # two words and the end


def test_the_report_shows_three_examples_with_what_is_learned(examples) -> None:
    project = examples()
    _, experiment = project.read()
    lines = "\n".join(report_lines(experiment, project.look()))
    assert "3 demonstrations" in lines
    assert "⟦" in lines
    assert "plan    trainer 1 rank" in lines
    assert "rollout" not in lines
    assert "shards" not in lines


def test_pairs_are_read_for_dpo_and_reward_models(examples) -> None:
    pairs = [(prompt, chosen, " x") for prompt, chosen in TRAIN]
    for objective in ("dpo", "reward_model"):
        found = examples(objective, pairs, [("x y", " z", " a"), ("y z", " x", " a")]).look()
        assert (found.problems, found.warnings) == ([], [])
        assert len(found.train_examples.data.rows) == 3


def test_a_beta_out_of_the_usual_range_is_a_warning_with_its_reason(examples) -> None:
    project = examples("dpo", [("a", " b", " c"), ("b", " c", " d")], [("x", " y", " z"), ("y", " z", " x")])
    (warning,) = project.look("trainer.beta=0.01").warnings
    assert warning.startswith("-o: trainer.beta = 0.01 is outside 0.05 to 0.5: so small a beta")
    (warning,) = project.look("trainer.beta=2.0").warnings
    assert "so large a beta" in warning


def test_every_beta_of_a_sweep_is_looked_at(examples) -> None:
    project = examples("dpo", [("a", " b", " c"), ("b", " c", " d")], [("x", " y", " z"), ("y", " z", " x")])
    low, high = project.look("sweep.beta=[0.01, 0.1, 2.0]").warnings
    assert low.startswith("-o: sweep.beta = 0.01 is outside 0.05 to 0.5: so small a beta")
    assert "sweep.beta = 2 is outside" in high


def test_a_batch_larger_than_the_data_is_a_problem(examples) -> None:
    (problem,) = examples().look("trainer.batch_size=4").problems
    assert problem.startswith("-o: trainer.batch_size (4) must be at most the 3 examples of data.train")


def test_held_out_prompts_that_are_trained_on_are_told(examples) -> None:
    (warning,) = examples(held_out=[*HELD_OUT, TRAIN[0]]).look().warnings
    assert warning.startswith("evaluation.data: 1 of 3 held-out prompts are also in data.train")
    (problem,) = examples(held_out=TRAIN[:2]).look().problems
    assert "2 of 2 held-out prompts are also in data.train: an evaluation on them measures memory" in problem


def test_one_held_out_example_is_too_few(examples) -> None:
    (problem,) = examples(held_out=HELD_OUT[:1]).look().problems
    assert problem.startswith("evaluation.data: one example has no interval")


def test_a_row_that_makes_no_example_is_named_with_its_line(examples) -> None:
    (problem,) = examples(train=[*TRAIN, ("a", "")]).look().problems
    assert problem.startswith("data: 1 of 4 rows cannot be used")
    assert "train.jsonl:4" in problem


def test_an_example_longer_than_the_context_is_a_problem(examples) -> None:
    project = examples(train=[*TRAIN, ("a " * 39 + "a", " b")])
    (problem,) = project.look().problems
    assert "row 3 (from 0)" in problem
    assert 'overlong = "drop" or "truncate"' in problem
    assert project.look("data.overlong=drop").problems == []
