"""A reward model that cannot score what the policy writes is named, with the remedy, before anything is made."""

import json
import shutil
from pathlib import Path

import pytest

from towline.launcher.check import report_lines

PART = '[[rewards]]\nuse = "reward_model"\nweight = 1.0\nmodel = "rm"\n\n[trainer]'
WHERE = "small.toml:23: rewards.model: "


@pytest.fixture
def with_model(project):
    """The project with a sound reward model, folder `rm`, as its second part."""
    shutil.copytree(project.model, project.folder / "rm")
    change_config(project.folder / "rm", architectures=["LlamaForSequenceClassification"], id2label={"0": "LABEL_0"})
    project.change("[trainer]", PART)
    return project


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def change_tokenizer(folder: Path, change) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    change(tokenizer)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def problem(project) -> str:
    (found,) = project.look().problems
    assert found.startswith(WHERE)
    return found.removeprefix(WHERE)


def test_a_sound_one_has_neither_problems_nor_warnings(with_model) -> None:
    found = with_model.look()
    assert (found.problems, found.warnings) == ([], [])


def test_the_report_shows_its_folder_and_what_it_needs(with_model) -> None:
    _, experiment = with_model.read()
    found = with_model.look()
    lines = list(report_lines(experiment, found))
    assert "reward  1.0 · exact_match + 1.0 · reward_model" in lines
    assert f"        reward_model   {with_model.folder}/rm" in lines
    size = (with_model.folder / "rm" / "model.safetensors").stat().st_size
    assert found.plan.reward_models == size
    assert any(line.startswith("        scorer  reward models 1.") for line in lines)


def test_its_path_is_relative_to_the_experiment_file(with_model) -> None:
    _, experiment = with_model.read()
    assert experiment.rewards[1].model == with_model.folder / "rm"
    again = type(experiment).model_validate_json(experiment.model_dump_json())
    assert again == experiment


def test_a_part_without_a_model_is_refused_with_its_line(project) -> None:
    project.change("[trainer]", PART.replace('model = "rm"\n', ""))
    with pytest.raises(Exception, match=r'small\.toml:20: rewards\.1: use = "reward_model" needs model'):
        project.read()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "rm is not a folder; expected a reward model, such as RUN/checkpoints/step-000040/hf"),
        (lambda rm: (rm / "config.json").unlink(), "rm has no config.json"),
        (lambda rm: (rm / "config.json").write_text("{"), "rm/config.json cannot be read"),
        (lambda rm: (rm / "model.safetensors").unlink(), "rm has no weights; expected model.safetensors"),
        (lambda rm: change_config(rm, architectures=["LlamaForCausalLM"]), "holds a LlamaForCausalLM, expected"),
        (lambda rm: change_config(rm, architectures=None), "holds a model of an unknown kind, expected"),
        (lambda rm: change_config(rm, id2label={"0": "no", "1": "so", "2": "yes"}), "gives 3 scores a text"),
        (lambda rm: change_config(rm, id2label=None), "gives 2 scores a text"),  # transformers' default
        (lambda rm: change_config(rm, score_of="step"), "scores the steps of a solution"),
        (lambda rm: change_config(rm, vocab_size=30), "knows 30 token ids and the policy writes 39"),
        (
            lambda rm: change_config(rm, max_position_embeddings=5),
            "was made for 5 tokens (max_position_embeddings); the longest prompt has 2, and with "
            "rollout.max_completion_tokens (4) a text may have 6",
        ),
        (lambda rm: (rm / "tokenizer.json").unlink(), "rm has no tokenizer.json, by which token ids are compared"),
        (lambda rm: (rm / "tokenizer.json").write_text("[]"), "cannot be read as a tokenizer"),
    ],
)
def test_unusable_folder(with_model, spoil, message: str) -> None:
    spoil(with_model.folder / "rm")
    assert message in problem(with_model)


def swap(tokenizer) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["c"], vocabulary["d"] = vocabulary["d"], vocabulary["c"]


def test_other_token_ids_are_counted_and_the_first_is_shown(with_model) -> None:
    change_tokenizer(with_model.folder / "rm", swap)
    assert problem(with_model) == (
        f"{with_model.folder}/rm has another tokenizer than the policy {with_model.model}: 2 of 39 token ids differ, "
        "such as 5, which is 'c' to the policy and 'd' to the reward model. It reads the policy's token ids as they "
        "are: train a reward model from the policy's folder, or from one of its family."
    )


def test_a_token_that_it_does_not_have_is_a_difference(with_model) -> None:
    change_tokenizer(with_model.folder / "rm", lambda tokenizer: tokenizer["model"]["vocab"].pop("9"))
    assert "1 of 39 token ids differ, such as 38, which is '9' to the policy and nothing to" in problem(with_model)


def test_a_special_token_of_another_meaning_is_a_difference(with_model) -> None:
    change_tokenizer(with_model.folder / "rm", lambda tokenizer: tokenizer["added_tokens"][1].update(content="</s>"))
    assert "such as 1, which is '<eos>' to the policy and '</s>' to the reward model" in problem(with_model)


def test_tokens_beyond_the_policys_and_other_settings_do_no_harm(with_model) -> None:
    def more(tokenizer) -> None:
        tokenizer["added_tokens"].append({"id": 39, "content": "[PAD]", "special": True})
        tokenizer["post_processor"] = {"type": "ByteLevel"}

    change_tokenizer(with_model.folder / "rm", more)
    change_config(with_model.folder / "rm", vocab_size=40)
    assert with_model.look().problems == []


def test_a_unigram_vocabulary_is_a_list_in_the_order_of_ids(with_model) -> None:
    def as_list(tokenizer) -> None:
        tokenizer["model"] = {"type": "Unigram", "vocab": [[token, -1.0] for token in tokenizer["model"]["vocab"]]}

    change_tokenizer(with_model.folder / "rm", as_list)
    assert with_model.look().problems == []


def test_texts_that_end_with_another_token_are_a_warning(with_model) -> None:
    settings = {"eos_token": {"content": "<unk>", "lstrip": False}}
    (with_model.folder / "rm" / "tokenizer_config.json").write_text(json.dumps(settings))
    (warning,) = with_model.look().warnings
    assert warning.startswith(f"{WHERE}{with_model.folder}/rm has learnt from texts that end with <unk>, and the polic")


def test_every_reward_model_is_looked_at(with_model) -> None:
    with_model.change("[evaluation.data]", PART.replace("[trainer]", 'name = "w"\n').replace('"rm"', '"other"')
                      + "\n[evaluation.data]")  # fmt: skip
    (found,) = with_model.look().problems
    assert found.startswith("small.toml:")
    assert "other is not a folder" in found


def test_a_missing_policy_is_told_once(with_model) -> None:
    shutil.rmtree(with_model.model)
    (found,) = with_model.look().problems
    assert found.startswith("policy.model")
