"""What the small models learn first: their vocabulary, and the texts of their task."""

import re

from tasks import SORT_DIGITS
from tiny_model import Lesson

SORT = Lesson(
    task="sort",
    # One token a character, with `\boxed{` as a single token so that an answer is short.
    tokens=("\\boxed{", "}", *"0123456789abcdefghijklmnopqrstuvwxyz+-*=?:, "),
    pieces=r"\\boxed\{",
    prompt=lambda example: f"sort:{example.question}=",
    completion=lambda example: f"\\boxed{{{example.answer}}}",
    completion_tokens=SORT_DIGITS + 3,  # opening, digits, closing, end of sequence
    hidden_size=128,
    num_layers=3,
    learning_rate=1e-3,
    target_accuracy=0.25,
)

_CODE_PHRASES = ("# f(", ") = ", ", f(", "\ndef f(x):\n    return", " x")
CODE = Lesson(
    task="code",
    # A number is one token, and so is what all questions have in common.
    tokens=(*_CODE_PHRASES, "x", "+", "-", "*", *map(str, range(100))),
    pieces="|".join([*map(re.escape, _CODE_PHRASES), r"\d+"]),
    prompt=lambda example: example.question,
    completion=lambda example: f" {example.answer}",
    completion_tokens=4,  # x, operator, number, end of sequence
    hidden_size=64,
    num_layers=2,
    learning_rate=4e-3,
    target_accuracy=0.8,  # about 0.3 at temperature 2
)

LESSONS = {"tiny-sort": SORT, "tiny-code": CODE}
"""By the name of the model's folder."""
