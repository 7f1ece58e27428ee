r"""Is a factual answer one of the gold answers, apart from how it is written? For names, dates, titles, short phrases.

SQuAD's normalised exact match (Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1: case, punctuation, articles),
with what it gets wrong mended: 3.14 stays apart from 314, -5 from 5, C# from C, and the answer "A" is no article.
The whole answer must be equal, so that naming every candidate earns nothing.
"""

import json
import re
import unicodedata
from typing import cast

from towline.rollout.rewards.boxed import after_thinking, last_boxed
from towline.rollout.rewards.verdict import Verdict
from towline.storage.errors import DataError

MAX_CHARS = 10_000
"""What is longer is no short answer."""
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox)\s*\{([^{}]*)\}|\\([$%&#_])")
_PLAIN = (
    dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2015\u2212"), "-")
    | dict.fromkeys(map(ord, "\u2018\u2019\u201a\u201b\u2032\u2039\u203a"), "'")
    | dict.fromkeys(map(ord, "\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb"), '"')
    | {0x2044: "/"}
    | dict.fromkeys(map(ord, "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"))
)
"""Dashes, quotation marks and the slash of fractions to those of ASCII; what takes no room is gone."""
_BEFORE_SMALL_DIGITS = re.compile(r"(?<=\d)(?=[\u00b2\u00b3\u00b9\u00bc-\u00be\u2070-\u2089\u2150-\u215e])")
"""NFKC writes them as ordinary ones: 10 squared is not 102."""
_GROUPED_DIGITS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_DASH_BETWEEN_NUMBERS = re.compile(r"(?<=\d)\s+-\s+(?=\d)")
_GAPS = re.compile(
    r"[,;·_()\[\]{}]"
    r"|(?<!\d):|:(?!\d)"  # 10:30 keeps it
    r"|-(?!\d)|(?<=[^\W\d_])-"  # so do -5 and 1914-1918, not Jean-Luc, COVID-19
    r"|(?<=[^\W\d_])\.(?=\d)"
    r"|(?<=\d)['\"](?=\d)"
)
"""What separates words or numbers."""
_DELETED = re.compile(r"\.(?!\d)|[$!?¡¿'\"`]")
"""What goes without leaving a gap: U.S. is US, O'Brien is OBrien; a point before a digit stays."""
_THE = re.compile(r"\bthe (?=\S)")
_LEADING_ARTICLE = re.compile(r"an? (?=\S)")


def grade(completion: str, gold: str) -> Verdict:
    """1.0 if the answer equals a gold answer once both are normalised, else 0.0.

    The answer is the content of the last box after the thinking, or without a box all that follows the thinking.

    Args:
        gold: the answer, or several as a JSON list of strings and numbers.

    Raises:
        DataError: there is no gold answer, or one of them is empty.
    """
    accepted = {normalised(answer) for answer in _gold_answers(gold)}
    if not all(accepted):
        raise DataError(f"a gold answer is empty: {gold[:200]!r}; give each row of the dataset an answer")
    answer = after_thinking(completion)
    if answer is None:
        return Verdict(value=0.0, detail="the thinking is not closed")
    boxed = last_boxed(completion)
    if boxed is None and r"\boxed" in answer:
        return Verdict(value=0.0, detail="the box is not closed")
    final = answer if boxed is None else boxed
    if len(final) > MAX_CHARS:
        return Verdict(value=0.0, detail=f"an answer of {len(final)} characters")
    return Verdict(value=float(normalised(final) in accepted))


def normalised(text: str) -> str:
    """Unicode NFKC, case folded, without LaTeX's text commands, grouped digits, punctuation, articles, odd spaces."""
    text = _TEXT_COMMAND.sub(lambda command: command[1] or command[2] or "", text)
    text = unicodedata.normalize("NFKC", _BEFORE_SMALL_DIGITS.sub(" ", text)).casefold().translate(_PLAIN)
    text = _GROUPED_DIGITS.sub(lambda number: number[0].replace(",", ""), text)
    text = _DASH_BETWEEN_NUMBERS.sub("-", text)
    return _without_articles(" ".join(_DELETED.sub("", _GAPS.sub(" ", text)).split()))


def _without_articles(words: str) -> str:
    """Without "the" before any word, and "a" or "an" at the very beginning: the A of Vitamin A is no article."""
    words = _THE.sub("", words)
    article = _LEADING_ARTICLE.match(words)
    return words if article is None else words[article.end() :]


def _gold_answers(gold: str) -> list[str]:
    if not gold.lstrip().startswith("["):
        return [gold]
    try:
        found: object = json.loads(gold)
    except (ValueError, RecursionError):
        return [gold]
    answers = cast(list[object], found)
    if not answers or not all(isinstance(one, str | int | float) and not isinstance(one, bool) for one in answers):
        raise DataError(f"gold answers {gold[:200]!r}: expected a JSON list of strings and numbers, not empty")
    return [one if isinstance(one, str) else json.dumps(one) for one in answers]
