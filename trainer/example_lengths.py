"""Examples of more tokens than are allowed: an error, left out, or cut at their end, as the config says.

What is cut keeps its prompt whole. A demonstration is not taught an end that it lost; a pair keeps one prompt and at
least a token of each completion; a solution keeps whole steps.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from towline.storage.errors import ConfigError, DataError
from towline.storage.example_config import Overlong
from towline.trainer.packing import TokenSequence
from towline.trainer.token_examples import NO_LABEL, TokenExample, TokenPair, TokenSteps

Example = TypeVar("Example", TokenExample, TokenPair, TokenSteps)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthCounts:
    """What became of the examples of one dataset."""

    num_examples: int
    """Before any was left out."""
    num_overlong: int
    """Of more tokens than are allowed; each of them is cut or left out."""
    num_truncated: int
    num_dropped: int
    max_tokens: int | None
    """That are allowed; None: any number."""
    longest_row: int
    longest_tokens: int
    """Of that row, before it was cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedExamples(Generic[Example]):
    examples: tuple[Example, ...]
    """In their order."""
    counts: LengthCounts


def example_limit(max_tokens: int | None, context_tokens: int | None) -> int | None:
    """Tokens that an example may have.

    Args:
        max_tokens: of the config; None: as many as the model can read.
        context_tokens: that the model can read; None where it does not say.

    Raises:
        ConfigError: the config allows more than the model can read.
    """
    if max_tokens is None or context_tokens is None:
        return context_tokens if max_tokens is None else max_tokens
    if max_tokens > context_tokens:
        raise ConfigError(
            f"max_tokens ({max_tokens:,}) is more than the model's context ({context_tokens:,} tokens). Set at most "
            "that, or leave it out."
        )
    return max_tokens


def fit_demonstrations(
    examples: Sequence[TokenExample], *, max_tokens: int | None, overlong: Overlong
) -> FittedExamples[TokenExample]:
    """
    Args:
        examples: at least one.
        max_tokens: of a whole example; None: any number.

    Raises:
        DataError: an example is too long and the config refuses that, or none is left.
    """
    return _fit(examples, cut_demonstration, max_tokens=max_tokens, overlong=overlong)


def fit_pairs(
    examples: Sequence[TokenPair], *, max_tokens: int | None, overlong: Overlong
) -> FittedExamples[TokenPair]:
    """As `fit_demonstrations`; each of the two sequences has the limit."""
    return _fit(examples, cut_pair, max_tokens=max_tokens, overlong=overlong)


def fit_steps(
    examples: Sequence[TokenSteps], *, max_tokens: int | None, overlong: Overlong
) -> FittedExamples[TokenSteps]:
    """As `fit_demonstrations`."""
    return _fit(examples, cut_steps, max_tokens=max_tokens, overlong=overlong)


def cut_demonstration(example: TokenExample, max_tokens: int) -> TokenExample | None:
    """What is left of a demonstration, up to the last token that is learned; None for nothing to learn."""
    room = max_tokens - example.tokens.num_prompt_tokens
    learned = np.flatnonzero(example.trained[: max(room, 0)])
    if len(learned) == 0:
        return None
    num_kept = int(learned[-1]) + 1
    return replace(example, tokens=_first(example.tokens, num_kept), trained=example.trained[:num_kept])


def cut_pair(pair: TokenPair, max_tokens: int) -> TokenPair | None:
    """What is left of a pair; None for a prompt without room after it, or two completions that became one."""
    room = max_tokens - pair.chosen.num_prompt_tokens
    if room < 1:
        return None
    cut = replace(pair, chosen=_first(pair.chosen, room), rejected=_first(pair.rejected, room))
    return None if cut.is_identical and not pair.is_identical else cut


def cut_steps(example: TokenSteps, max_tokens: int) -> TokenSteps | None:
    """The steps that fit; None where none of them is judged."""
    num_steps = int(np.searchsorted(example.step_ends, max_tokens))
    if np.all(example.labels[:num_steps] == NO_LABEL):
        return None
    step_ends = example.step_ends[:num_steps]
    num_kept = int(step_ends[-1]) + 1 - example.tokens.num_prompt_tokens
    return replace(
        example, tokens=_first(example.tokens, num_kept), step_ends=step_ends, labels=example.labels[:num_steps]
    )


def _first(tokens: TokenSequence, num_completion_tokens: int) -> TokenSequence:
    """A length to keep, never one to take off: as a bound of a slice that could be negative."""
    return replace(tokens, token_ids=tokens.token_ids[: tokens.num_prompt_tokens + num_completion_tokens])


def _fit(
    examples: Sequence[Example],
    cut: Callable[[Example, int], Example | None],
    *,
    max_tokens: int | None,
    overlong: Overlong,
) -> FittedExamples[Example]:
    lengths = np.array([num_tokens(example) for example in examples])
    too_long = np.zeros(len(lengths), dtype=bool) if max_tokens is None else lengths > max_tokens
    longest = int(np.argmax(lengths))
    if overlong == "refuse" and max_tokens is not None and too_long.any():
        raise DataError(
            f"row {examples[longest].row} (from 0) has {lengths[longest]:,} tokens; {too_long.sum():,} of "
            f"{len(lengths):,} examples have more than max_tokens ({max_tokens:,}). Allow more, or set "
            'overlong = "drop" or "truncate".'
        )
    kept = list(_kept(examples, too_long, cut if overlong == "truncate" else None, max_tokens))
    if not kept:
        raise DataError(
            f"no example is left of {len(lengths):,}: all have more than max_tokens ({max_tokens:,}), row "
            f'{examples[longest].row} (from 0) {lengths[longest]:,}, and overlong is "{overlong}". Allow more.'
        )
    num_overlong, num_dropped = int(too_long.sum()), len(lengths) - len(kept)
    counts = LengthCounts(
        num_examples=len(lengths),
        num_overlong=num_overlong,
        num_truncated=num_overlong - num_dropped,
        num_dropped=num_dropped,
        max_tokens=max_tokens,
        longest_row=examples[longest].row,
        longest_tokens=int(lengths[longest]),
    )
    return FittedExamples(examples=tuple(kept), counts=counts)


def _kept(
    examples: Sequence[Example],
    too_long: Iterable[bool],
    cut: Callable[[Example, int], Example | None] | None,
    max_tokens: int | None,
) -> Iterable[Example]:
    for example, is_too_long in zip(examples, too_long, strict=True):
        if not is_too_long or max_tokens is None:
            yield example
        elif cut is not None and (shorter := cut(example, max_tokens)) is not None:
            yield shorter


def num_tokens(example: TokenExample | TokenPair | TokenSteps) -> int:
    """Of the longer sequence of a pair."""
    if isinstance(example, TokenPair):
        return max(len(example.chosen.token_ids), len(example.rejected.token_ids))
    return len(example.tokens.token_ids)
