r"""Does an answer cite the sources that it was given, and none that it made up?

A weak signal on purpose: it looks at the marks, not at whether a source says what it is cited for.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from towline.rollout.rewards.boxed import after_thinking
from towline.rollout.rewards.verdict import Verdict
from towline.storage.errors import DataError

_CITE_COMMAND = re.compile(r"\\[a-zA-Z]*cite[a-zA-Z]*\*?\s*(?:\[[^\[\]]*\]\s*){0,2}\{([^{}]*)\}")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})\s*[-\u2013]\s*([0-9]{1,9})")
_LETTERS, _DIGITS = re.compile(r"[^\W\d_]+"), re.compile(r"[0-9]+")


@dataclass(frozen=True, slots=True)
class _Sources:
    known: frozenset[str]
    required: frozenset[str]
    """Each of these must be cited; empty: any one will do."""


def grade(completion: str, gold: str) -> Verdict:
    r"""1.0 if at least one source is cited (all that are required, if some are), and only sources that exist.

    Citations are `[1]`, `[1, 3]`, `[1-3]`, `[doc-3]`, `[^1]`, `\cite{smith2020}` and its kin, in what follows the
    thinking. All that `\cite` names is a citation. Brackets are one if everything in them is a source, or looks like
    the sources: where these are `doc-1` and `doc-2`, `[doc-9]` cites and `[note]` does not.

    Args:
        gold: JSON: the ids of the sources that exist, as a list; or {"sources": [...], "required": [...]}.

    Raises:
        DataError: gold is neither.
    """
    sources = _sources(gold)
    answer = after_thinking(completion)
    if answer is None:
        return Verdict(value=0.0, detail="the thinking is not closed")
    cited: set[str] = set()
    for source in _cited(answer, sources.known):
        if source not in sources.known:
            return Verdict(value=0.0, detail=f"cites {source[:50]}, which is no source")
        cited.add(source)
    if missing := sources.required - cited:
        return Verdict(value=0.0, detail=f"does not cite {_some(missing)}")
    return Verdict(value=1.0) if cited else Verdict(value=0.0, detail="cites nothing")


def _cited(answer: str, known: frozenset[str]) -> Iterator[str]:
    shapes = frozenset(map(_shape, known))
    for command in _CITE_COMMAND.finditer(answer):
        yield from _members(command[1])
    for content in dict.fromkeys(_BRACKETS.findall(_CITE_COMMAND.sub(" ", answer))):
        members = [one for member in _members(content.removeprefix("^")) for one in _spelled_out(member, known)]
        if all(member in known or _shape(member) in shapes for member in members):
            yield from members


def _members(text: str) -> list[str]:
    return [member for part in re.split(r"[,;]", text) if (member := part.strip())]


def _spelled_out(member: str, known: frozenset[str]) -> list[str]:
    """The sources of a range: its first and last, and of those between as many as there can be."""
    bounds = _RANGE.fullmatch(member)
    if bounds is None or member in known or int(bounds[1]) >= int(bounds[2]):
        return [member]
    first, last = int(bounds[1]), int(bounds[2])
    return [str(number) for number in range(first, min(last, first + len(known)))] + [bounds[2]]


def _shape(source: str) -> str:
    """`doc-12` and `doc-3` have the same, and so have `smith2020` and `jones1999`."""
    return _DIGITS.sub("0", _LETTERS.sub("a", source))


def _some(ids: frozenset[str]) -> str:
    return ", ".join(one[:50] for one in sorted(ids)[:3])


def _sources(gold: str) -> _Sources:
    try:
        found: Any = json.loads(gold)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the gold answer is no JSON ({error}): {gold[:200]!r}; list the ids of the sources") from error
    if not isinstance(found, dict):
        found = {"sources": found}
    fields = cast(dict[str, Any], found)
    lists = [fields.get("sources"), fields.get("required", [])]
    if not fields.keys() <= {"sources", "required"} or not lists[0] or not all(map(_is_ids, lists)):
        raise DataError(
            f"the gold answer is {gold[:200]!r}; expected the ids of the sources as a JSON list, or "
            '{"sources": [...], "required": [...]}'
        )
    known, required = (frozenset(str(one) for one in ids) for ids in lists)
    if not required <= known:
        raise DataError(f"the gold answer requires {_some(required - known)}, which is not among its sources")
    return _Sources(known, required)


def _is_ids(value: object) -> bool:
    """Strings that are not empty, or whole numbers."""
    return isinstance(value, list) and all(
        bool(one.strip()) if isinstance(one, str) else type(one) is int for one in cast(list[object], value)
    )
