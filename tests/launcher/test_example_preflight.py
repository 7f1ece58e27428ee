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


@pytest.fixture
def without_tokenizer(monkeypatch) -> None:
    """Starting one takes seconds."""
    monkeypatch.setattr("towline.launcher.example_preflight.can_tokenize", lambda: False)


@pytest.mark.usefixtures("without_tokenizer")
def test_check_says_what_each_of_two_models_learns_from(examples) -> None:
    """With the seed 0 the prompts a and c are in the first half, b, g and i in the second."""
    pairs = [(prompt, " x", " y") for prompt in "acbgib"]
    project = examples("reward_model", pairs, [("x y", " z", " a"), ("y z", " x", " a")])
    _, experiment = project.read("watcher=true")
    found = project.look("watcher=true")
    lines = list(report_lines(experiment, found))
    assert [line for line in lines if " half " in line] == [
        "data    first half   2 preferences on 2 prompts, for the reward model",
        "data    second half   4 preferences on 3 prompts, for the watcher",
    ]
    assert any("in each of 2 runs 4 checkpoints of" in line for line in lines)
    assert found.problems == []
    assert project.look().halves == []


@pytest.mark.usefixtures("without_tokenizer")
def test_a_half_with_too_few_pairs_for_a_batch_is_a_problem(examples) -> None:
    project = examples("reward_model", [(p, " x", " y") for p in "acbgi"], [("x y", " z", " a"), ("y z", " x", " a")])
    (problem,) = project.look("watcher=true", "trainer.batch_size=3").problems
    assert problem.startswith("-o: trainer.batch_size (3) must be at most the 2 examples of the first half of data.tr")
    assert len(project.look("watcher=true", "trainer.batch_size=4").problems) == 2
    (problem,) = project.look("data.half=first", "trainer.batch_size=3").problems
    assert "must be at most the 2 examples of the first half of data.train" in problem
    assert project.look("data.half=second", "trainer.batch_size=3").problems == []


def test_pairs_that_are_left_out_as_overlong_are_in_no_half(examples) -> None:
    long = " x" * 40
    pairs = [("a", long, " y"), *((prompt, " x", " y") for prompt in "acbgi")]
    project = examples("reward_model", pairs, [("x y", " z", " a"), ("y z", " x", " a")])
    found = project.look("watcher=true", "data.overlong=drop")
    assert [count.num_pairs for count in found.halves] == [2, 3]


@pytest.mark.usefixtures("without_tokenizer")
def test_a_half_is_named_beside_its_file_and_only_it_leaks(examples) -> None:
    """The held-out prompt a is of the first half."""
    project = examples("reward_model", [(p, " x", " y") for p in "acbgi"], [("a", " z", " x"), ("y z", " x", " a")])
    found = project.look("data.half=second")
    (line,) = (line for line in report_lines(project.read("data.half=second")[1], found) if "data    train" in line)
    assert "   3 preferences, " in line
    assert "   second half of " in line
    leaks = [project.look(option).warnings[0] for option in ("data.half=first", "watcher=true")]
    assert all("1 of 2 held-out prompts are also in data.train" in warning for warning in leaks)
    assert not any("held-out prompts" in warning for warning in found.warnings)


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
