"""The `[data]` table of an experiment, and `[evaluation] data`: where prompts come from and how they read."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from towline.storage.config import ConfigPath, StrictModel, resolve_path

TASK_PREFIX = "reasoning_gym:"
PromptField = Literal["prompt", "answer"]
_FIELDS: tuple[PromptField, ...] = get_args(PromptField)


def _resolve_source(value: Any, info: ValidationInfo) -> Any:
    if not isinstance(value, str) or value.startswith(TASK_PREFIX):
        return value
    if not value.strip():
        raise ValueError("is empty; expected a file, a folder or reasoning_gym:TASK")
    return str(resolve_path(value, info))


class SourceConfig(StrictModel):
    """Where rows come from. What they are to hold is said by the classes of it."""

    train: Annotated[str, BeforeValidator(_resolve_source)]
    """A `.jsonl` or `.parquet` file, a folder of such files, a folder written by Hugging Face `save_to_disk`, or a
    procedural task as `reasoning_gym:TASK`. Paths are relative to the config file."""
    size: Annotated[int, Field(gt=0)] | None = None
    """Number of examples of a procedural task (rows). A file has its own."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the procedural task's examples (no unit)."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of the procedural task, as the task names them (units are the task's own)."""

    @property
    def task(self) -> str | None:
        """Name of the procedural task; None for files."""
        return self.train.removeprefix(TASK_PREFIX) if self.train.startswith(TASK_PREFIX) else None

    @property
    @abstractmethod
    def columns(self) -> Sequence[str]:
        """Every column that a row must have, once."""

    @property
    def optional_columns(self) -> Sequence[str]:
        """Columns that are read where they are."""
        return ()

    @property
    @abstractmethod
    def naming(self) -> str:
        """How to say which columns are meant, for messages."""

    @model_validator(mode="after")
    def _settings_fit_the_source(self) -> Self:
        if self.task is None:
            self._refuse_task_settings()
        else:
            self._require_task_settings()
        return self

    def _refuse_task_settings(self) -> None:
        given = {"size": self.size is not None, "seed": self.seed != 0, "options": bool(self.options)}
        if ignored := [name for name, is_given in given.items() if is_given]:
            raise ValueError(f"{' and '.join(ignored)} would be ignored: only a {TASK_PREFIX}TASK has them, not a file")

    def _require_task_settings(self) -> None:
        if not self.task:
            raise ValueError(f"train names no task; expected {TASK_PREFIX}TASK")
        if self.size is None:
            raise ValueError(f"size is missing: say how many examples of {self.task} to make, for example size = 1000")
        if twice := sorted({"size", "seed"} & self.options.keys()):
            raise ValueError(f"options.{twice[0]} has a key of its own: write {twice[0]} = {self.options[twice[0]]!r}")


class DataConfig(SourceConfig):
    fields: dict[str, str | tuple[str, ...]] = Field(default_factory=dict, validate_default=True)
    """Which column holds the `prompt` and which the `answer` (column names). One left out keeps its own name. Several
    columns as the answer, such as ["test", "entry_point"], make one JSON object of those that are not null."""
    template: ConfigPath | None = None
    """A text file with `{prompt}` in it exactly once; every other brace stands for itself, and one newline at the
    file's end is dropped. None: the prompt as it is."""
    chat: bool = True
    """Whether the text is wrapped as one user turn with the tokenizer's chat template. False: the model reads it as
    it is."""

    @property
    def prompt_column(self) -> str:
        column = self.fields["prompt"]
        assert isinstance(column, str), column
        return column

    @property
    def columns(self) -> list[str]:
        """Every column that is read, once."""
        answer = self.fields["answer"]
        return list(dict.fromkeys([self.prompt_column, *([answer] if isinstance(answer, str) else answer)]))

    @property
    def naming(self) -> str:
        return "Name the columns in fields = { prompt = …, answer = … }"

    @field_validator("fields")
    @classmethod
    def _both_fields(cls, fields: dict[str, str | tuple[str, ...]]) -> dict[str, str | tuple[str, ...]]:
        if unknown := sorted(fields.keys() - set(_FIELDS)):
            raise ValueError(f"{unknown[0]} is not a field of a prompt; the fields are prompt and answer")
        columns: dict[str, str | tuple[str, ...]] = {name: fields.get(name, name) for name in _FIELDS}
        if not isinstance(columns["prompt"], str):
            raise ValueError("the prompt is one column; only an answer may be several")
        if not columns["answer"]:
            raise ValueError("the answer is no column at all; name one or more")
        if columns["prompt"] == columns["answer"]:
            raise ValueError(
                f'prompt and answer are both column "{columns["prompt"]}": the prompt would tell the answer'
            )
        return columns

    def _require_task_settings(self) -> None:
        super()._require_task_settings()
        if any(column != name for name, column in self.fields.items()):
            raise ValueError("fields would be ignored: a procedural task has no columns to choose; leave fields out")
