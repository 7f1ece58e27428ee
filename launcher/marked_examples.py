"""Examples as text in which one sees what is learned."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from towline.trainer.token_examples import NO_LABEL, TokenExample, TokenPair, TokenSteps

BEGIN, END = "⟦", "⟧"
"""Around what is learned, and around the label of a step."""
Decode = Callable[[list[int]], str]
"""Text with special tokens."""


def marked(decode: Decode, example: TokenExample | TokenPair | TokenSteps) -> list[str]:
    """Two texts of a pair, chosen and rejected; one of the others."""
    match example:
        case TokenExample():
            before = np.zeros(example.tokens.num_prompt_tokens, dtype=np.bool_)
            return [_between_marks(decode, example.tokens.token_ids, np.concatenate([before, example.trained]))]
        case TokenPair():
            return [
                _between_marks(decode, tokens.token_ids, np.arange(len(tokens.token_ids)) >= tokens.num_prompt_tokens)
                for tokens in (example.chosen, example.rejected)
            ]
        case TokenSteps():
            return [_with_labels(decode, example)]


def _between_marks(decode: Decode, token_ids: NDArray[np.integer[Any]], is_learned: NDArray[np.bool_]) -> str:
    starts = np.flatnonzero(np.diff(is_learned, prepend=False))
    texts = _pieces(decode, token_ids, starts.tolist())
    # Learned and not learned by turns, not learned first.
    return "".join(f"{BEGIN}{text}{END}" if number % 2 else text for number, text in enumerate(texts))


def _with_labels(decode: Decode, example: TokenSteps) -> str:
    prompt, *steps = _pieces(
        decode, example.tokens.token_ids, [example.tokens.num_prompt_tokens, *(example.step_ends[:-1] + 1).tolist()]
    )
    labels = ["no label" if label == NO_LABEL else str(label) for label in example.labels.tolist()]
    return prompt + "".join(f"{step}{BEGIN}{label}{END}" for step, label in zip(steps, labels, strict=True))


def _pieces(decode: Decode, token_ids: NDArray[np.integer[Any]], cuts: Sequence[int]) -> list[str]:
    """Text before, between and after the cuts. Decoded from the beginning each time: some tokenizers write a piece by
    itself without the space it begins with."""
    ids: list[int] = token_ids.tolist()
    ends = [0, *(len(decode(ids[:cut])) for cut in cuts)]
    whole = decode(ids)
    return [whole[start:end] for start, end in pairwise([*ends, len(whole)])]
