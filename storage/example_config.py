"""Tables of an experiment that teach by example: demonstrations (SFT), preferences (DPO, reward models), judged steps
(process reward models)."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from towline.storage.config import ConfigPath
from towline.storage.data_config import SourceConfig

Overlong = Literal["refuse", "drop", "truncate"]
Turns = Literal["all", "last"]
Half = Literal["first", "second"]


class ExampleConfig(SourceConfig):
    """What every kind of example is read and cut by."""

    template: ConfigPath | None = None
    """A text file with `{prompt}` in it exactly once; every other brace stands for itself, and one newline at the
    file's end is dropped. None: the prompt as it is. Only for prompts that are text, not turns."""
    chat: bool = True
    """Whether turns are wrapped with the tokenizer's chat template. False: the model reads prompt and completion as
    they are, one after the other."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """Of a whole example, its prompt included. None: the model's context."""
    overlong: Overlong = "refuse"
    """What becomes of examples of more tokens: an error, left out and counted, or cut at their end and counted."""


class DemonstrationData(ExampleConfig):
    """Conversations to be imitated."""

    fields: dict[str, str] = Field(default_factory=dict, validate_default=True)
    """Which columns hold `prompt` and `completion`, or which one holds `messages` (a list of {"role", "content"}).
    By default prompt and completion, under these names."""
    turns: Turns = "all"
    """Which of the assistant's turns are learned."""

    @property
    def messages_column(self) -> str | None:
        """None where prompt and completion are columns of their own."""
        return self.fields.get("messages")

    @property
    def prompt_column(self) -> str:
        return self.fields["prompt"]

    @property
    def completion_column(self) -> str:
        """What a procedural task calls its answer is the completion."""
        return self.fields["completion"] if self.task is None else "answer"

    @property
    def columns(self) -> Sequence[str]:
        messages = self.messages_column
        return (self.prompt_column, self.completion_column) if messages is None else (messages,)

    @property
    def naming(self) -> str:
        return (
            "Name the columns in fields = { prompt = …, completion = … }, or the one column of whole conversations "
            "in fields = { messages = … }"
        )

    @field_validator("fields")
    @classmethod
    def _known_fields(cls, fields: dict[str, str]) -> dict[str, str]:
        if "messages" not in fields:
            return _named(fields, "a demonstration", ("prompt", "completion"), ("messages",))
        if beside := sorted(fields.keys() - {"messages"}):
            raise ValueError(f"{beside[0]} cannot stand beside messages: a conversation holds prompt and completion")
        return _named(fields, "a demonstration", ("messages",))

    @model_validator(mode="after")
    def _conversations_are_chats(self) -> Self:
        if self.messages_column is None:
            return self
        if not self.chat:
            raise ValueError("messages are turns, which need the chat template: leave chat = false out")
        if self.template is not None:
            raise ValueError("template would be ignored: messages hold whole turns; name prompt and completion instead")
        return self

    def _require_task_settings(self) -> None:
        super()._require_task_settings()
        if any(column != name for name, column in self.fields.items()) or self.messages_column is not None:
            raise ValueError("fields would be ignored: a procedural task has no columns to choose; leave fields out")


class PreferenceData(ExampleConfig):
    """Two completions of one prompt, of which one is better."""

    fields: dict[str, str] = Field(default_factory=dict, validate_default=True)
    """Which columns hold `prompt`, `chosen`, `rejected` and, if at all, `margin` (by how much chosen is better, a
    number in units of the reward). Without a prompt, chosen and rejected are conversations that differ in the last
    turn."""
    half: Half | None = None
    """Take the pairs of one half of the prompts and leave out the others; no prompt is in both. None: all pairs."""
    half_seed: Annotated[int, Field(ge=0)] = 0
    """Decides, with nothing but a prompt's own text, in which half it is. Halves that are to be disjoint need the same
    (no unit)."""

    @property
    def prompt_column(self) -> str:
        return self.fields.get("prompt", "prompt")

    @property
    def columns(self) -> Sequence[str]:
        return tuple(self.fields.values())

    @property
    def optional_columns(self) -> Sequence[str]:
        return () if "prompt" in self.fields else ("prompt",)

    @property
    def naming(self) -> str:
        return "Name the columns in fields = { prompt = …, chosen = …, rejected = … }"

    @field_validator("fields")
    @classmethod
    def _known_fields(cls, fields: dict[str, str]) -> dict[str, str]:
        named = _named(fields, "a preference", ("chosen", "rejected"), ("prompt", "margin"))
        if "prompt" not in fields and "prompt" in named.values():
            raise ValueError('column "prompt" is the prompt; name another as the prompt in fields')
        return named

    @model_validator(mode="after")
    def _seed_has_halves(self) -> Self:
        if self.half is None and self.half_seed:
            raise ValueError('half_seed would be ignored: name the half, half = "first" or "second", or leave it out')
        return self

    def _require_task_settings(self) -> None:
        raise ValueError("a procedural task has no preferences; expected a file or a folder of files")


class StepData(ExampleConfig):
    """Solutions in steps, each of which is judged."""

    fields: dict[str, str] = Field(default_factory=dict, validate_default=True)
    """Which columns hold `prompt`, `steps` (a list of texts) and `labels` (for each step: 1 or true, 0 or false, null
    or -100 for no label). One left out keeps its own name."""
    separator: str = "\n"
    """Written after every step; a step is judged at its last token."""

    @property
    def columns(self) -> Sequence[str]:
        return tuple(self.fields.values())

    @property
    def naming(self) -> str:
        return "Name the columns in fields = { prompt = …, steps = …, labels = … }"

    @field_validator("fields")
    @classmethod
    def _known_fields(cls, fields: dict[str, str]) -> dict[str, str]:
        return _named(fields, "a judged solution", ("prompt", "steps", "labels"))

    def _require_task_settings(self) -> None:
        raise ValueError("a procedural task has no judged steps; expected a file or a folder of files")


def _named(
    fields: Mapping[str, str], example: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, str]:
    """Every field that is read with its column; one left out of the required keeps its own name."""
    known = (*required, *optional)
    if unknown := sorted(fields.keys() - set(known)):
        raise ValueError(f"{unknown[0]} is not a field of {example}; the fields are {', '.join(known)}")
    columns = {name: fields.get(name, name) for name in known if name in required or name in fields}
    for name, column in columns.items():
        if not column:
            raise ValueError(f"{name} is no column at all; name one")
        if same := [other for other in columns if other != name and columns[other] == column]:
            raise ValueError(f'{name} and {same[0]} are both column "{column}"; expected one column for each')
    return columns
