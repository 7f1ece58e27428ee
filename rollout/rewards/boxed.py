r"""Find the answer a completion commits itself to: the last `\boxed{...}` after the thinking.

Every function is one pass over the text, because completions are whatever the policy cares to emit.
"""

import re
from collections import deque
from collections.abc import Iterator

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

# `\boxed 6` is how part of the MATH solutions box a number; `\boxed` followed by a word is prose about boxing.
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:(?P<brace>\{)|(?P<bare>[-+\u2212]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?))")
_BRACE_OR_ESCAPE = re.compile(r"\\.|[{}]", re.DOTALL)


def after_thinking(text: str) -> str | None:
    """Return what follows the last `</think>`, or None while a `<think>` is still open.

    A `</think>` alone counts as an end too: some chat templates put `<think>` at the end of the prompt.
    """
    answer = text.rpartition(THINK_CLOSE)[2]
    return None if THINK_OPEN in answer else answer


def last_boxed(text: str) -> str | None:
    """Return the content of the last box after the thinking, or None if there is none or it never closes."""
    answer = after_thinking(text)
    if answer is None:
        return None
    last = next(iter(deque(_BOX.finditer(answer), maxlen=1)), None)
    if last is None:
        return None
    if last["bare"] is not None:
        return last["bare"]
    end = _closing_brace(answer, last.end())
    return None if end is None else answer[last.end() : end].strip()


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
