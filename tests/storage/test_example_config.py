from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from towline.storage.example_config import DemonstrationData, ExampleConfig, PreferenceData, StepData

KINDS = (DemonstrationData, PreferenceData, StepData)


def validated(kind: type[ExampleConfig], **values: Any) -> Any:
    return kind.model_validate({"train": "a.jsonl", **values}, context={"folder": "/experiments"})


def refusal(kind: type[ExampleConfig], **values: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        validated(kind, **values)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_paths_are_relative_to_the_config_file_and_unknown_keys_refused(kind: type[ExampleConfig]):
    config = validated(kind, template="solve.txt")
    assert (config.train, config.template) == ("/experiments/a.jsonl", Path("/experiments/solve.txt"))
    assert "extra_forbidden" in refusal(kind, max_length=3)
    assert "would be ignored" in refusal(kind, size=3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_limit_leaves_room_for_a_prompt_and_a_completion(kind: type[ExampleConfig]):
    assert validated(kind).max_tokens is None
    assert validated(kind, max_tokens=2).max_tokens == 2
    assert "greater than or equal to 2" in refusal(kind, max_tokens=1)
    assert "'refuse', 'drop' or 'truncate'" in refusal(kind, overlong="cut")


@pytest.mark.parametrize(
    ("kind", "fields", "columns", "optional"),
    [
        (DemonstrationData, {}, ("prompt", "completion"), ()),
        (DemonstrationData, {"completion": "answer"}, ("prompt", "answer"), ()),
        (DemonstrationData, {"messages": "turns"}, ("turns",), ()),
        (PreferenceData, {}, ("chosen", "rejected"), ("prompt",)),
        (PreferenceData, {"prompt": "question"}, ("chosen", "rejected", "question"), ()),
        (PreferenceData, {"margin": "gap"}, ("chosen", "rejected", "gap"), ("prompt",)),
        (StepData, {"steps": "solution"}, ("prompt", "solution", "labels"), ()),
    ],
)
def test_fields_have_their_own_names_unless_told(
    kind: type[ExampleConfig], fields: dict[str, str], columns: tuple[str, ...], optional: tuple[str, ...]
):
    config = validated(kind, fields=fields)
    assert tuple(config.columns) == columns
    assert tuple(config.optional_columns) == optional
    again = kind.model_validate_json(config.model_dump_json())
    assert again == config


@pytest.mark.parametrize(
    ("kind", "fields", "found"),
    [
        (
            DemonstrationData,
            {"answer": "a"},
            "answer is not a field of a demonstration; the fields are prompt, completion, messages",
        ),
        (DemonstrationData, {"messages": "m", "prompt": "p"}, "prompt cannot stand beside messages"),
        (DemonstrationData, {"messages": ""}, "messages is no column at all"),
        (DemonstrationData, {"completion": "prompt"}, 'prompt and completion are both column "prompt"'),
        (
            PreferenceData,
            {"chose": "c"},
            "chose is not a field of a preference; the fields are chosen, rejected, prompt, margin",
        ),
        (PreferenceData, {"chosen": "rejected"}, 'chosen and rejected are both column "rejected"'),
        (PreferenceData, {"chosen": "prompt"}, 'column "prompt" is the prompt; name another'),
        (
            StepData,
            {"step": "s"},
            "step is not a field of a judged solution; the fields are prompt, steps, labels",
        ),
    ],
)
def test_fields_that_cannot_be_are_refused(kind: type[ExampleConfig], fields: dict[str, str], found: str):
    assert found in refusal(kind, fields=fields)


def test_conversations_need_the_chat_template_and_have_no_prompt_to_wrap():
    messages = {"fields": {"messages": "messages"}}
    assert "need the chat template" in refusal(DemonstrationData, chat=False, **messages)
    assert "template would be ignored" in refusal(DemonstrationData, template="a.txt", **messages)


def test_a_seed_of_halves_needs_a_half():
    assert validated(PreferenceData).half is None
    assert validated(PreferenceData, half="second", half_seed=3).half_seed == 3
    assert "half_seed would be ignored" in refusal(PreferenceData, half_seed=3)
    assert "'first' or 'second'" in refusal(PreferenceData, half="third")


def test_a_procedural_task_demonstrates_its_answers_and_prefers_nothing():
    task = {"train": "reasoning_gym:chain_sum", "size": 10}
    assert validated(DemonstrationData, **task).columns == ("prompt", "answer")
    assert "size is missing" in refusal(DemonstrationData, train="reasoning_gym:chain_sum")
    assert "fields would be ignored" in refusal(DemonstrationData, fields={"prompt": "question"}, **task)
    assert "fields would be ignored" in refusal(DemonstrationData, fields={"messages": "messages"}, **task)
    assert "has no preferences; expected a file" in refusal(PreferenceData, **task)
    assert "has no judged steps; expected a file" in refusal(StepData, **task)
