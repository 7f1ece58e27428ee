"""Turn validation errors into lines a user can act on: file, line, field, what was found, what to write instead."""

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from towline.storage.errors import ConfigError


def read_toml(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a TOML file, and what it says. Raises ConfigError: it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        line = 1 + path.read_bytes()[: error.start].count(b"\n")
        raise ConfigError(f"{path}:{line}: not UTF-8, which TOML is written in; save the file as UTF-8.") from error
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, error) from error


def _syntax_error(path: Path, error: tomllib.TOMLDecodeError) -> ConfigError:
    line = re.search(r"line (\d+)", str(error))
    where = f"{path.name}:{line.group(1)}" if line else path.name
    message = re.sub(r" \(at .*", "", str(error))
    return ConfigError(f"{where}: not valid TOML: {message}.")


def describe_errors(path: Path, text: str, overridden: set[str], error: ValidationError, root: type[BaseModel]) -> str:
    lines = key_lines(text)
    found = error.errors(include_url=False)
    # A list whose items are wrong is also reported as too short; the items say it better.
    broken = {item["loc"][0] for item in found if len(item["loc"]) > 1}
    described = [
        _describe(path, lines, overridden, item, root)
        for item in found
        if not (item["type"] == "too_short" and item["loc"][0] in broken)
    ]
    return "\n".join(dict.fromkeys(described))


def _describe(path: Path, lines: dict[str, int], overridden: set[str], item: Any, root: type[BaseModel]) -> str:
    location = [part for part in item["loc"] if isinstance(part, (str, int))]
    key = ".".join(map(str, location))
    where = "-o" if key in overridden else f"{path.name}:{_nearest_line(lines, location)}"
    if item["type"] == "extra_forbidden":
        names = _fields_at(root, location[:-1])
        close = difflib.get_close_matches(str(location[-1]), names, n=1)
        hint = f"Did you mean {close[0]}?" if close else f"Fields here: {', '.join(names)}."
        return f"{where}: {key} is not a field. {hint}"
    if item["type"] == "missing":
        return f"{where}: {key} is missing. {_doc_at(root, location)}".rstrip()
    message = item["msg"].removeprefix("Value error, ")
    found = "" if isinstance(item["input"], dict) or message.startswith(key) else f" (found {item['input']!r})"
    prefix = "" if not key or key in message else f"{key}: "
    return f"{where}: {prefix}{message}{found}."


def key_lines(text: str) -> dict[str, int]:
    """Dotted key → 1-based line of a TOML text that has already parsed. Items of arrays of tables count from 0."""
    lines: dict[str, int] = {}
    counts: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if header := re.match(r"\[\[\s*([^\]]+?)\s*\]\]", stripped):
            name = header.group(1)
            counts[name] = counts.get(name, -1) + 1
            table = f"{name}.{counts[name]}"
            lines[table] = number
        elif header := re.match(r"\[\s*([^\]]+?)\s*\]", stripped):
            table = header.group(1)
            lines[table] = number
        elif assignment := re.match(r"([A-Za-z0-9_.\-]+)\s*=", stripped):
            key = assignment.group(1)
            lines.setdefault(f"{table}.{key}".lstrip("."), number)
    return lines


def _nearest_line(lines: dict[str, int], location: list[str | int]) -> int:
    for end in range(len(location), 0, -1):
        key = ".".join(map(str, location[:end]))
        if key in lines:
            return lines[key]
    return 1


def _fields_at(root: type[BaseModel], location: list[str | int]) -> list[str]:
    model = _model_at(root, location)
    return list(model.model_fields) if model else []


def _doc_at(root: type[BaseModel], location: list[str | int]) -> str:
    model = _model_at(root, location[:-1])
    field = model.model_fields.get(str(location[-1])) if model else None
    return " ".join((field.description or "").split()) if field else ""


def _model_at(root: type[BaseModel], location: list[str | int]) -> type[BaseModel] | None:
    model: type[BaseModel] | None = root
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if model else None
        model = _model_in(field.annotation) if field else None
    return model


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The config class inside an annotation such as `Model | None` or `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if found := _model_in(argument):
            return found
    return None
