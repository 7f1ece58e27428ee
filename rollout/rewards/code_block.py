"""Which part of a completion is the program."""

import re

from towline.rollout.rewards.boxed import after_thinking

_FENCE = re.compile(r"^[ \t]*+```[ \t]*+(\w*+)[ \t\r]*+$", re.MULTILINE)
"""Gives nothing back: one pass, whatever the policy writes."""
_PYTHON = {"", "py", "python", "python3"}


def program(completion: str, prompt: str = "", entry_point: str = "") -> str:
    """The last closed block of Python, or without any block all that follows the thinking; empty if there is none.

    Args:
        prompt: code that the completion may go on from: it stands before the program. Text without a block that does
            not define the entry point itself is the rest of the prompt's last function, as far as it is indented.
    """
    text = after_thinking(completion) or ""
    block = _last_block(text)
    code = text if block is None else block
    if not prompt or not code.strip():
        return code if code.strip() else ""
    if re.search(rf"^(async\s+def|def|class)\s+{re.escape(entry_point)}\b", code, re.MULTILINE):
        return f"{prompt}\n\n{code}"
    return prompt + (_indented(code) if block is None else code)


def _last_block(text: str) -> str | None:
    """None without a fence; empty if there are fences and no closed block of Python."""
    fences = list(_FENCE.finditer(text))
    if not fences:
        return None
    found, begin = "", None
    for fence in fences:
        if begin is None:
            begin = fence
        elif not fence[1]:
            if begin[1].lower() in _PYTHON:
                found = text[begin.end() + 1 : fence.start()]
            begin = None
        else:  # a block within a block: its author forgot to close the first
            begin = fence
    return found


def _indented(code: str) -> str:
    """Base models write on after the end of a function."""
    lines = code.splitlines(keepends=True)
    end = next((number for number, line in enumerate(lines) if number and line.strip() and line[0] not in " \t"), None)
    return "".join(lines[:end])
