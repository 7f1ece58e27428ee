"""One `[[rewards]]` table of an experiment file."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from towline.storage.config import StrictModel, resolve_path

OVERLONG = "overlong"
"""The built-in part that looks at a completion's number of tokens, and not at its text."""


def _resolve_file(value: object, info: ValidationInfo) -> object:
    """Make the path of a user's own reward absolute; a built-in name stays as it is."""
    if not isinstance(value, str):
        return value
    file, colon, function = value.rpartition(":")
    return f"{resolve_path(file, info)}:{function}" if colon else value


class RewardConfig(StrictModel):
    use: Annotated[str, BeforeValidator(_resolve_file), Field(min_length=1)]
    """A built-in reward (`math_answer`, `format`, …), or `path/to/file.py:function` relative to the experiment."""
    weight: Annotated[float, Field(allow_inf_nan=False)]
    """Factor of this part in the total; 0 records the part without training on it."""
    name: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = None
    """What the part is called in the ledger and the metrics; by default taken from `use`."""
    cache_tokens: Annotated[int | None, Field(ge=1)] = None
    """Only for use = "overlong", DAPO's soft penalty: it falls from 0 to -1 over the last so many tokens before
    rollout.max_completion_tokens."""

    @model_validator(mode="after")
    def _cache_belongs_to_overlong(self) -> "RewardConfig":
        if self.is_overlong and self.cache_tokens is None:
            raise ValueError(
                f'use = "{OVERLONG}" needs cache_tokens: over how many tokens before rollout.max_completion_tokens the '
                "penalty grows (DAPO: a fifth of it)"
            )
        if self.cache_tokens is not None and not self.is_overlong:
            raise ValueError(f'cache_tokens is of use = "{OVERLONG}" alone; {self.use} knows no lengths. Remove it')
        if self.is_overlong and self.weight < 0:
            raise ValueError(
                f'use = "{OVERLONG}" is 0 or negative already: weight = {self.weight:g} would pay for length. Set a '
                "weight of 0 or more (DAPO: 1)"
            )
        return self

    @property
    def is_overlong(self) -> bool:
        return self.use == OVERLONG

    @property
    def part_name(self) -> str:
        """`name`, or the built-in's name, or `file.function`: never a path, since it becomes a column name."""
        if self.name is not None:
            return self.name
        file, colon, function = self.use.rpartition(":")
        return f"{Path(file).stem}.{function}" if colon else self.use
