"""Lines of JSON that have a completion and a gold answer, under whatever names, read whole before anything is scored.

A line may have one completion (a string, or a chat whose last assistant message it is) or a list of them.
"""

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from towline.launcher.score.sample import EarlierScore
from towline.launcher.score.score_json import FIELD, earlier_score
from towline.launcher.score.text_group import text_group
from towline.storage.dataset_files import data_files, shown
from towline.storage.dataset_rows import READERS, Columns, SourceRow, json_kind, json_rows, missing_field
from towline.storage.datasets import Rejected, answer_text, rejection
from towline.storage.errors import ConfigError, DataError
from towline.storage.records import RolloutGroup

STDIN = "-"
NAMES = {
    "completion": ("completion", "completions", "response", "responses", "text", "messages"),
    "answer": ("answer", "gold"),
}
"""What is needed → fields that are taken for it when they are not named."""
NUM_TOKENS = "num_tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    where: str
    """File and number, from 1."""
    values: dict[str, Any]
    """The whole line, as it was."""
    group: RolloutGroup
    """Its completions, as a grader takes them: without prompt, and with as many tokens as the line says, all 0."""
    is_list: bool
    earlier: tuple[EarlierScore | None, ...]
    """One for each completion."""

    def place(self, number: int) -> str:
        return f"{self.where}[{number}]" if self.is_list else self.where


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    completion: str
    answer: str
    earlier: str
    """Where an earlier score is, if the line has one."""
    num_tokens: str | None
    """None: tokens are not counted."""


def parse_fields(text: str | None) -> dict[str, str]:
    """`completion=response,answer=gold` → what it names."""
    named: dict[str, str] = {}
    for item in filter(None, (text or "").split(",")):
        key, equals, name = (piece.strip() for piece in item.partition("="))
        if key not in NAMES or not equals or not name:
            near = difflib.get_close_matches(key, NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near and near[0] != key else "expected completion=FIELD,answer=FIELD"
            raise ConfigError(f"--fields {text}: {item}: {hint}")
        named[key] = name
    return named


def read_lines(source: str, named: Mapping[str, str], *, compare: str | None, needs_tokens: bool) -> list[Line]:
    """
    Args:
        source: a `.jsonl` file, or `-` for standard input.
        named: what is needed → its field, where the user says it; else it is taken from the first line.
        compare: field of earlier scores that must be there; None: what `towline score` wrote, if it is there.

    Raises:
        DataError: up to ten lines that cannot be scored, each with what is wrong with it; nothing was scored.
    """
    fields: Fields | None = None
    lines: list[Line] = []
    rejected: list[str] = []
    for row in _rows(source):
        try:
            if row.problem is not None:
                raise Rejected(row.problem)
            if fields is None:
                fields = Fields(
                    completion=named.get("completion") or _recognised("completion", row),
                    answer=named.get("answer") or _recognised("answer", row),
                    earlier=compare or FIELD,
                    num_tokens=NUM_TOKENS if needs_tokens else None,
                )
            lines.append(_line(len(lines), row, fields))
        except Rejected as reason:
            rejected.append(f"{row.where}: {reason}")
    if rejected:
        raise rejection(source, len(rejected), rejected)
    if not lines:
        raise DataError(f"{'standard input' if source == STDIN else source} has no lines")
    if compare is not None and not any(one for line in lines for one in line.earlier):
        raise DataError(f'--compare {compare}: no line has a score in field "{compare}"')
    return lines


def _rows(source: str) -> Iterable[SourceRow]:
    if source == STDIN:
        return json_rows("stdin", sys.stdin.buffer)
    path = Path(source)
    if path.suffix != ".jsonl":
        raise DataError(
            f"{shown(path)} is no .jsonl file. Others can be piped, such as zcat X.jsonl.gz | towline score -"
        )
    return (row for file in data_files(path) for row in READERS[".jsonl"](file, Columns()))


def _recognised(key: str, row: SourceRow) -> str:
    """The one field of the first line that may hold what is needed; to guess among several would be to lie."""
    found = [name for name in NAMES[key] if name in row.values]
    if len(found) == 1:
        return found[0]
    if found:
        problem = f"{' and '.join(found)} may all be the {key}"
    else:
        problem = (
            f"no {key}: expected one of {', '.join(NAMES[key])}; the line has: {', '.join(row.values) or 'nothing'}"
        )
    # Of every other line the same would be said.
    raise DataError(f"{row.where}: {problem}. Say which: --fields {key}=FIELD")


def _line(number: int, row: SourceRow, fields: Fields) -> Line:
    completion, answer = (_value(row, name, key) for key, name in
                          (("completion", fields.completion), ("answer", fields.answer)))  # fmt: skip
    texts, is_list = _texts(completion, fields.completion)
    gold = answer_text(answer, fields.answer)
    num_tokens = None
    if fields.num_tokens is not None:
        num_tokens = [
            _count(one, fields.num_tokens)
            for one in _each(_value(row, fields.num_tokens), len(texts), is_list, fields.num_tokens)
        ]
    earlier = _each(row.values.get(fields.earlier), len(texts), is_list, fields.earlier)
    return Line(
        where=row.where,
        values=row.values,
        group=text_group(number, gold, texts, num_tokens),
        is_list=is_list,
        earlier=tuple(earlier_score(one, fields.earlier) for one in earlier),
    )


def _value(row: SourceRow, name: str, key: str | None = None) -> Any:
    if name not in row.values:
        mend = f"Name it: --fields {key}=FIELD" if key else "A part of the rewards counts tokens"
        raise Rejected(missing_field(name, row.values, mend))
    return row.values[name]


def _texts(value: object, name: str) -> tuple[list[str], bool]:
    """The completions of a line, and whether they are a list."""
    many = _list(value)
    if many and _chat(value) is None:
        return [_text(one, f"{name}[{number}]") for number, one in enumerate(many)], True
    return [_text(value, name)], False


def _text(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    if (chat := _chat(value)) is not None:
        return _last_answer(chat, name)
    kind = "an empty list" if value == [] else json_kind(value)
    raise Rejected(f'field "{name}" is {kind}; expected a string, a chat, or a list of them')


def _chat(value: object) -> list[dict[str, object]] | None:
    messages = [cast("dict[str, object]", one) for one in _list(value) or () if isinstance(one, dict)]
    is_chat = messages and len(messages) == len(_list(value) or ()) and all("role" in one for one in messages)
    return messages if is_chat else None


def _last_answer(chat: Sequence[Mapping[str, object]], name: str) -> str:
    said = [message.get("content") for message in chat if message["role"] == "assistant"]
    if not said:
        raise Rejected(f'field "{name}" is a chat without a message of role assistant')
    if isinstance(said[-1], str):
        return said[-1]
    # Where images may be among it, a content is a list of pieces.
    pieces = [cast("dict[str, object]", one).get("text") for one in _list(said[-1]) or () if isinstance(one, dict)]
    texts = [piece for piece in pieces if isinstance(piece, str)]
    if not texts or len(texts) < len(_list(said[-1]) or ()):
        raise Rejected(f'field "{name}": the last message of role assistant is no text')
    return "".join(texts)


def _each(value: object, num: int, is_list: bool, name: str) -> list[object]:
    """A value for each completion of a line."""
    if not is_list or value is None:
        return [value] * num
    values = _list(value)
    if values is None or len(values) != num:
        found = json_kind(value) if values is None else f"a list of {len(values)}"
        raise Rejected(f'field "{name}" is {found}; expected a list of {num}, one for each completion')
    return values


def _list(value: object) -> list[object] | None:
    return cast("list[object]", value) if isinstance(value, list) else None


def _count(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Rejected(f'field "{name}" is {json_kind(value)}; expected a whole number from 0')
    return value
