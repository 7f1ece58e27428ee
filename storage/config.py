"""The one strict base of every config class, and paths that are relative to the file that names them."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo

_VARIABLE = re.compile(r"\$\{(\w+)\}")


class StrictModel(BaseModel):
    """Unknown keys are refused, nothing is coerced across types, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


def resolve_path(value: Any, info: ValidationInfo) -> Any:
    """Expand `${VAR}` and make a path absolute, relative to the config file's folder (`info.context["folder"]`)."""
    if isinstance(value, Path) or not isinstance(value, str):
        return value
    context: dict[str, Any] = info.context or {}
    variables: dict[str, str] = context.get("vars", {})

    def expand(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in variables:
            known = ", ".join(sorted(variables)) or "none"
            raise ValueError(f"${{{name}}} is not a variable of the cluster profile (known: {known})")
        return variables[name]

    expanded = os.path.expanduser(_VARIABLE.sub(expand, value))
    resolved = os.path.normpath(Path(context.get("folder", ".")) / expanded)
    # Strict validation takes a path as text from JSON, and as a path from Python.
    return resolved if info.mode == "json" else Path(resolved)


ConfigPath = Annotated[Path, BeforeValidator(resolve_path)]
"""A path in a config file."""
