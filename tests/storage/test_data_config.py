from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from towline.storage.data_config import DataConfig


def validated(folder: str | Path = "/experiments", **values: Any) -> DataConfig:
    return DataConfig.model_validate(values, context={"folder": folder, "vars": {"DATA": "/lustre/data"}})


def refusal(**values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        validated(**values)
    return str(caught.value)


def test_paths_are_relative_to_the_config_file():
    config = validated(train="data/train.jsonl", template="../prompts/boxed.txt")
    assert config.train == "/experiments/data/train.jsonl"
    assert config.template == Path("/prompts/boxed.txt")


def test_a_variable_of_the_profile_is_expanded_in_the_path():
    assert validated(train="${DATA}/train.parquet").train == "/lustre/data/train.parquet"


def test_a_task_is_not_taken_for_a_path():
    config = validated(train="reasoning_gym:chain_sum", size=10)
    assert config.train == "reasoning_gym:chain_sum"
    assert config.task == "chain_sum"
    assert validated(train="train.jsonl").task is None


def test_fields_have_their_own_names_unless_told():
    assert validated(train="a.jsonl").fields == {"prompt": "prompt", "answer": "answer"}
    assert validated(train="a.jsonl", fields={"prompt": "question"}).fields == {
        "prompt": "question",
        "answer": "answer",
    }


def test_an_unknown_field_is_refused_with_the_known_ones():
    message = refusal(train="a.jsonl", fields={"promt": "question"})
    assert "promt is not a field of a prompt; the fields are prompt and answer" in message


def test_one_column_cannot_be_prompt_and_answer():
    assert "the prompt would tell the answer" in refusal(train="a.jsonl", fields={"prompt": "text", "answer": "text"})


def test_a_task_needs_its_size():
    assert "size is missing" in refusal(train="reasoning_gym:chain_sum")


@pytest.mark.parametrize("values", [{"size": 5}, {"seed": 1}, {"options": {"min_terms": 2}}])
def test_settings_of_a_task_are_refused_for_a_file(values: dict[str, Any]):
    assert f"{next(iter(values))} would be ignored" in refusal(train="a.jsonl", **values)


@pytest.mark.parametrize("key", ["size", "seed"])
def test_size_and_seed_are_not_options(key: str):
    message = refusal(train="reasoning_gym:chain_sum", size=5, options={key: 3})
    assert f"options.{key} has a key of its own: write {key} = 3" in message


def test_columns_are_refused_for_a_task():
    assert "fields would be ignored" in refusal(train="reasoning_gym:a", size=5, fields={"prompt": "question"})


@pytest.mark.parametrize("train", ["", "  "])
def test_an_empty_source_is_refused(train: str):
    assert "is empty" in refusal(train=train)


def test_a_task_without_a_name_is_refused():
    assert "names no task" in refusal(train="reasoning_gym:", size=5)


@pytest.mark.parametrize("values", [{"size": 0}, {"size": "5"}, {"seed": -1}, {"chat": 1}, {"colour": "red"}])
def test_values_are_not_coerced_nor_unknown_keys_taken(values: dict[str, Any]):
    refusal(train="reasoning_gym:a", **({"size": 5} | values))


def test_a_resolved_config_reads_back_as_itself():
    config = validated(train="train.jsonl", template="boxed.txt", fields={"prompt": "question"}, chat=False)
    again = DataConfig.model_validate(config.model_dump(mode="json"), context={"folder": "/elsewhere"})
    assert again == config
