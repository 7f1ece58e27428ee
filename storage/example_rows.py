"""One row of a source to one example. Whether its turns fit a chat template is for the tokenizer to say."""

import math
from collections.abc import Sequence
from typing import Any, cast, get_args

from towline.storage.dataset_rows import SourceRow, json_kind, missing_field
from towline.storage.datasets import Rejected, checked_text
from towline.storage.example_config import DemonstrationData, ExampleConfig, PreferenceData, StepData
from towline.storage.records import Demonstration, LabelledSteps, Preference, Role, Turn

NO_LABEL = -100
"""What datasets made for Hugging Face trainers write for a step that nobody judged."""
_ROLES: tuple[Role, ...] = get_args(Role)
_NOT_READ = ("tool_calls", "function_call", "reasoning_content", "thinking")
"""Keys of a turn that would change what the assistant said; nothing of it may be lost in silence."""
_LABELS: dict[tuple[type, object], int | None] = {
    (bool, True): 1,
    (bool, False): 0,
    (int, 1): 1,
    (int, 0): 0,
    (int, NO_LABEL): None,
    (type(None), None): None,
}
Template = tuple[str, str]
"""What stands before and after a prompt that is text."""


def demonstration(number: int, row: SourceRow, config: DemonstrationData, template: Template) -> Demonstration:
    """Raises Rejected, as all of these do."""
    values = _values(row, config)
    if config.messages_column is not None:
        turns = _turns(values[config.messages_column], config.messages_column)
        _require_last_of_assistant(turns, config.messages_column)
        return Demonstration(row=number, turns=turns)
    prompt = _prompt(values[config.prompt_column], config.prompt_column, config, template)
    name = config.completion_column
    context, completion = _completion(values[name], name)
    if context:
        raise Rejected(f'field "{name}" has {len(context) + 1} turns; expected one, the assistant\'s')
    return Demonstration(row=number, turns=(*prompt, Turn(role="assistant", content=completion)))


def preference(number: int, row: SourceRow, config: PreferenceData, template: Template) -> Preference:
    values = _values(row, config)
    context, chosen = _completion(values[config.fields["chosen"]], config.fields["chosen"])
    rejected_context, rejected = _completion(values[config.fields["rejected"]], config.fields["rejected"])
    if context != rejected_context:
        raise Rejected(_where_contexts_part(context, rejected_context))
    given = values.get(config.prompt_column)
    if given is None and not context:
        raise Rejected(missing_field(config.prompt_column, row.values, config.naming))
    if given is None:
        prompt = _whole_turns(context, "chosen", config)
    else:
        prompt = _prompt_with_context(given, context, config, template)
    margin = _margin(values[config.fields["margin"]], config.fields["margin"]) if "margin" in config.fields else None
    return Preference(row=number, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin)


def labelled_steps(number: int, row: SourceRow, config: StepData, template: Template) -> LabelledSteps:
    values, fields = _values(row, config), config.fields
    prompt = _prompt(values[fields["prompt"]], fields["prompt"], config, template)
    steps = [_text(step, name) for name, step in _list(values, fields["steps"])]
    labels = [_label(label, name) for name, label in _list(values, fields["labels"])]
    if len(steps) != len(labels):
        raise Rejected(f"found {len(steps)} steps and {len(labels)} labels; expected one label for each step")
    if all(label is None for label in labels):
        raise Rejected(f'field "{fields["labels"]}" judges no step; expected 0 or 1 for one at least')
    return LabelledSteps(row=number, prompt=prompt, steps=tuple(steps), labels=tuple(labels))


def _values(row: SourceRow, config: ExampleConfig) -> dict[str, Any]:
    if row.problem is not None:
        raise Rejected(row.problem)
    for name in config.columns:
        if name not in row.values:
            raise Rejected(missing_field(name, row.values, config.naming))
    return row.values


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise Rejected(f'field "{name}" is {json_kind(value)}; expected a string')
    return checked_text(value, name)


def _list(values: dict[str, Any], name: str) -> list[tuple[str, object]]:
    """Each value of a list, with its name."""
    if not isinstance(values[name], list):
        raise Rejected(f'field "{name}" is {json_kind(values[name])}; expected a list')
    if not values[name]:
        raise Rejected(f'field "{name}" is an empty list')
    return [(f"{name}[{index}]", value) for index, value in enumerate(values[name])]


def _prompt(value: object, name: str, config: ExampleConfig, template: Template) -> tuple[Turn, ...]:
    if not isinstance(value, list):
        before, after = template
        return (Turn(role="user", content=before + _text(value, name) + after),)
    turns = _whole_turns(_turns(cast(object, value), name), name, config)
    if turns[-1].role != "user":
        raise Rejected(f'field "{name}" ends with a turn of {turns[-1].role}; expected the user\'s')
    return turns


def _whole_turns(turns: tuple[Turn, ...], name: str, config: ExampleConfig) -> tuple[Turn, ...]:
    if not config.chat:
        raise Rejected(f'field "{name}" holds turns; with chat = false the prompt is a string')
    if config.template is not None:
        raise Rejected(f'field "{name}" holds turns; a template needs a prompt that is a string')
    return turns


def _prompt_with_context(
    given: object, context: tuple[Turn, ...], config: PreferenceData, template: Template
) -> tuple[Turn, ...]:
    """The prompt column, whose text the conversations may repeat, with a system turn or earlier turns before it."""
    prompt = _prompt(given, config.prompt_column, config, template)
    if not context:
        return prompt
    plain = _prompt(given, config.prompt_column, config, ("", ""))
    if context == plain:
        return prompt
    if context[-len(plain) :] != plain:
        raise Rejected(
            f'field "{config.prompt_column}" is not what chosen and rejected have before their last turn; expected the '
            "same turns there, or only the assistant's turn in chosen and rejected"
        )
    return _whole_turns(context, "chosen", config)


def _completion(value: object, name: str) -> tuple[tuple[Turn, ...], str]:
    """The turns before the assistant's last, none for a text, and what it says."""
    if not isinstance(value, list):
        return (), _text(value, name)
    turns = _turns(cast(object, value), name)
    if turns[-1].role != "assistant":
        _require_last_of_assistant(turns, name)
    return turns[:-1], turns[-1].content


def _require_last_of_assistant(turns: Sequence[Turn], name: str) -> None:
    if all(turn.role != "assistant" for turn in turns):
        raise Rejected(f'field "{name}" has no turn of assistant; expected the last one to be')
    if turns[-1].role != "assistant":
        raise Rejected(f'field "{name}" ends with a turn of {turns[-1].role}; expected the assistant\'s')
    if len(turns) == 1:
        raise Rejected(f'field "{name}" has one turn; expected a prompt before what the assistant says')


def _turns(value: object, name: str) -> tuple[Turn, ...]:
    if not isinstance(value, list):
        raise Rejected(f'field "{name}" is {json_kind(value)}; expected a list of turns')
    if not value:
        raise Rejected(f'field "{name}" is an empty list; expected turns')
    return tuple(_turn(turn, f"{name}[{index}]") for index, turn in enumerate(cast(list[object], value)))


def _turn(value: object, name: str) -> Turn:
    if not isinstance(value, dict):
        raise Rejected(f'turn "{name}" is {json_kind(value)}; expected an object with role and content')
    turn = cast(dict[str, Any], value)
    for key in ("role", "content"):
        if key not in turn:
            raise Rejected(f'turn "{name}" has no {key}; it has: {", ".join(turn) or "nothing"}')
    if (role := turn["role"]) not in _ROLES:
        raise Rejected(f'turn "{name}" has the role {role!r}; expected {", ".join(_ROLES[:-1])} or {_ROLES[-1]}')
    if unread := [key for key in _NOT_READ if turn.get(key)]:
        raise Rejected(f'turn "{name}" has {unread[0]}, which is not read; expected all that is said in content')
    content = turn["content"]
    # An empty system turn has a meaning: not the one that a chat template puts there of its own.
    return Turn(role=role, content="" if role == "system" and content == "" else _text(content, f"{name}.content"))


def _where_contexts_part(chosen: Sequence[Turn], rejected: Sequence[Turn]) -> str:
    if len(chosen) != len(rejected):
        return (
            f"chosen has {len(chosen) + 1} turns and rejected {len(rejected) + 1}; expected conversations that differ "
            "only in the last turn"
        )
    first = next(index for index, (one, other) in enumerate(zip(chosen, rejected, strict=True)) if one != other)
    return (
        f"chosen and rejected differ already in turn {first} (from 0) of {len(chosen) + 1}; expected conversations "
        "that differ only in the last turn"
    )


def _margin(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Rejected(f'field "{name}" is {json_kind(value)}; expected a number')
    if value < 0:
        raise Rejected(f'field "{name}" is {value}, by which rejected would be the better; expected 0 or more')
    return float(value)


def _label(value: object, name: str) -> int | None:
    """By type and value: as a truth value every number but 0, and so -100 for "no label", would be a right step."""
    key = (type(value), value if isinstance(value, int) else None)
    if key not in _LABELS:
        raise Rejected(f'field "{name}" is {value!r}; expected 0, 1, true, false, null or {NO_LABEL}')
    return _LABELS[key]
