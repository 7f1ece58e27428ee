r"""Find the answer a completion commits itself to: the last `\boxed{...}` after the thinking.

Every function is one pass over the text, because completions are whatever the policy cares to emit.
"""

import re
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

# `\boxed 6` is how part of the MATH solutions box a number; `\boxed` followed by a word is prose about boxing.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(?P<brace>\{)|(?P<bare>[-+\u2212]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?))")
_LIST_SEPARATOR = re.compile(r"[\s$]*(?:[,;][\s$]*(?:(?:and|or)[\s$]+)?|(?:and|or)[\s$]+)")
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)

MAX_LISTED_BOXES = 20


class _Box(NamedTuple):
    start: int
    end: int
    content: str | None


def after_thinking(text: str) -> str | None:
    """Return what follows the last `</think>`, or None while a `<think>` is still open.

    A `</think>` alone counts as an end too: some chat templates put `<think>` at the end of the prompt.
    """
    answer = text.rpartition(THINK_CLOSE)[2]
    return None if THINK_OPEN in answer else answer


def last_boxed(text: str) -> str | None:
    """Return the content of the last box after the thinking, or None if there is none or it never closes."""
    boxes = _last_boxes(text, maxlen=1)
    return boxes[-1].content if boxes else None


def boxed_answer(text: str) -> str | None:
    r"""Return the last box after the thinking with those it makes one list with: `\boxed{2}, \boxed{9} and \boxed{11}`.

    Boxes make a list when only commas, semicolons, `and` or `or` stand between them; it is joined by commas. Boxes with
    anything else between, or nothing, are several answers, of which the last one counts.
    """
    boxes = _last_boxes(text, maxlen=MAX_LISTED_BOXES + 1)
    if not boxes or boxes[-1].content is None:
        return None
    answer = after_thinking(text) or ""
    listed = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        if box.content is None or not _LIST_SEPARATOR.fullmatch(answer, box.end, listed[0].start):
            break
        listed.insert(0, box)
    return ", ".join(box.content or "" for box in listed)


def _last_boxes(text: str, maxlen: int) -> list["_Box"]:
    """The boxes that open last, in order; each with its content, or None if it never closes."""
    answer = after_thinking(text)
    if answer is None:
        return []
    boxes: list[_Box] = []
    for match in deque(_BOX.finditer(answer), maxlen=maxlen):
        if match["bare"] is not None:
            boxes.append(_Box(match.start(), match.end(), match["bare"]))
            continue
        end = _closing_brace(answer, match.end())
        content = None if end is None else answer[match.end() : end].strip()
        boxes.append(_Box(match.start(), len(answer) if end is None else end + 1, content))
    return boxes


def closed_boxes(text: str) -> Iterator[str]:
    r"""Yield the content of each outermost `\boxed{...}`; an unclosed one ends the search."""
    position = 0
    while (box := _BOX.search(text, position)) is not None:
        position = box.end()
        if box["brace"] is None:
            continue
        end = _closing_brace(text, position)
        if end is None:
            return
        yield text[position:end]
        position = end + 1


def _closing_brace(text: str, start: int) -> int | None:
    r"""Index of the brace that closes the group opened just before `start`; `\{` and `\}` are ordinary characters."""
    depth = 1
    for token in _BRACE_OR_ESCAPE.finditer(text, start):
        if token[0] == "{":
            depth += 1
        elif token[0] == "}":
            depth -= 1
            if depth == 0:
                return token.start()
    return None
