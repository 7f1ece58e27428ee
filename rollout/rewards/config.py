"""One `[[rewards]]` table of an experiment file."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, ValidationInfo

from towline.storage.config import StrictModel, resolve_path


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

    @property
    def part_name(self) -> str:
        """`name`, or the built-in's name, or `file.function`: never a path, since it becomes a column name."""
        if self.name is not None:
            return self.name
        file, colon, function = self.use.rpartition(":")
        return f"{Path(file).stem}.{function}" if colon else self.use
