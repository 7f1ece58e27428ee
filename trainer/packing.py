"""The flat arrays of one micro-batch: pieces laid end to end in one row. Numpy only; nothing is padded.

A piece is a prompt followed by completions of it, [prompt | c1 | c2 | ...]: the prompt is computed once. Each
completion sees the prompt and itself, and its position ids go on where the prompt's end. For attention the row is
divided into segments: the prompt with its first completion is one, each further completion another whose *prefix* is
the prompt. A piece of one completion is thus one segment without a prefix.

What goes together is decided in `packing_plan`; `attention.varlen_attention` isolates segments from each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

DUMMY_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """A prompt with its completion."""

    token_ids: NDArray[np.integer]
    num_prompt_tokens: int
    """At least 1: something must predict the first token of the completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Flat arrays of one micro-batch. T = its tokens, S = its segments, N = its completion tokens."""

    token_ids: NDArray[np.int64]
    """[T]"""
    position_ids: NDArray[np.int64]
    """[T], from 0 in each prompt, on from its length in each of its completions."""
    cu_seq_lens: NDArray[np.int32]
    """[S + 1], the first token of each segment, then T."""
    prefixes: NDArray[np.int32]
    """[S, 2], first token and length of what a segment sees before itself; (0, 0) for nothing."""
    max_length: int
    """Tokens of the longest segment."""
    logit_index: NDArray[np.int64]
    """[N] positions of T whose hidden states predict the completion tokens, in the order of the sequences. The last
    token of a prompt is there once for each of its completions."""
    target_ids: NDArray[np.int64]
    """[N] the tokens that they predict."""
    completion_index: NDArray[np.int64]
    """[N] positions of T of the completion tokens themselves: where a prompt is shared, a completion's first token does
    not lie behind the one that predicts it."""
    num_completion_tokens: tuple[int, ...]
    """For each sequence; they add up to N."""
    num_rows: int | None = None
    """Rows of one length that the T tokens are, each a sequence padded on the right (`packing_rows`). None: one packed
    row, whose segments the attention keeps apart."""

    @property
    def shares_prompts(self) -> bool:
        return bool(self.prefixes.any())

    @property
    def last_index(self) -> NDArray[np.int64]:
        """For each sequence the position in T of its last completion token, where a reward model scores it."""
        assert all(self.num_completion_tokens), "found a completion without tokens, which has no last one"
        return self.completion_index[np.cumsum(self.num_completion_tokens, dtype=np.int64) - 1]

    def gather(self, per_token: Sequence[ArrayLike]) -> NDArray[np.float32]:
        """Lay per-token values of each completion (old log-probs, weights, ...) end to end: [N], as `logit_index`."""
        values = [np.asarray(array, dtype=np.float32) for array in per_token]
        lengths = tuple(len(array) for array in values)
        assert lengths == self.num_completion_tokens, f"found {lengths} values, need {self.num_completion_tokens}"
        return np.concatenate(values) if values else np.empty(0, dtype=np.float32)

    def spread(self, per_completion: ArrayLike) -> NDArray[np.float32]:
        """Repeat one value of each completion (its advantage, ...) for each of its tokens: [N], as `logit_index`."""
        return np.repeat(np.asarray(per_completion, dtype=np.float32), self.num_completion_tokens)


def pack(sequences: Sequence[TokenSequence]) -> PackedBatch:
    """Lay sequences end to end, each a piece of its own that shares nothing."""
    return pack_pieces([[sequence] for sequence in sequences])


def pack_pieces(pieces: Sequence[Sequence[TokenSequence]]) -> PackedBatch:
    """Lay pieces end to end. The sequences of a piece have one prompt.

    Nothing is a micro-batch too: a dummy sequence of `DUMMY_TOKENS` tokens without a target, N = 0. The caller does
    with it what it always does: forward, `hidden_TD[logit_index]` (no rows), `token_logprobs`, a loss that is a *sum*
    over N, backward. The loss is 0 and connected, every parameter gets a gradient of zeros, and this rank walks the
    same collectives as the others. A mean over N would be NaN; skipping backward would hang ZeRO.
    """
    if not pieces:
        dummy = TokenSequence(token_ids=np.zeros(DUMMY_TOKENS, dtype=np.int64), num_prompt_tokens=DUMMY_TOKENS)
        return replace(pack([dummy]), num_completion_tokens=())
    row = _Row()
    for sequences in pieces:
        row.append(sequences)
    return row.batch()


@dataclass(slots=True)
class _Row:
    """Pieces so far, in lists of arrays."""

    num_tokens: int = 0
    token_ids: list[NDArray[np.integer]] = field(default_factory=list)
    position_ids: list[NDArray[np.int64]] = field(default_factory=list)
    logit_index: list[NDArray[np.int64]] = field(default_factory=list)
    completion_index: list[NDArray[np.int64]] = field(default_factory=list)
    completions: list[NDArray[np.integer]] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    """Their first tokens."""
    prefixes: list[tuple[int, int]] = field(default_factory=list)

    def append(self, sequences: Sequence[TokenSequence]) -> None:
        start, prompt = self.num_tokens, _common_prompt(sequences)
        self._add_segment(prefix=(0, 0))
        self._add_tokens(prompt, first_position=0)
        for number, sequence in enumerate(sequences):
            completion = sequence.token_ids[len(prompt) :]
            if number > 0 and len(completion) > 0:
                self._add_segment(prefix=(start, len(prompt)))
            places = self.num_tokens + np.arange(len(completion))
            predicting = places - 1
            predicting[:1] = start + len(prompt) - 1
            self.completion_index.append(places)
            self.logit_index.append(predicting)
            self.completions.append(completion)
            self._add_tokens(completion, first_position=len(prompt))

    def _add_segment(self, *, prefix: tuple[int, int]) -> None:
        self.segments.append(self.num_tokens)
        self.prefixes.append(prefix)

    def _add_tokens(self, token_ids: NDArray[np.integer], *, first_position: int) -> None:
        self.token_ids.append(token_ids)
        self.position_ids.append(first_position + np.arange(len(token_ids)))
        self.num_tokens += len(token_ids)

    def batch(self) -> PackedBatch:
        bounds = np.array([*self.segments, self.num_tokens], dtype=np.int32)
        return PackedBatch(
            token_ids=np.concatenate(self.token_ids).astype(np.int64),
            position_ids=np.concatenate(self.position_ids),
            cu_seq_lens=bounds,
            prefixes=np.array(self.prefixes, dtype=np.int32),
            max_length=int(np.diff(bounds).max()),
            logit_index=np.concatenate(self.logit_index),
            target_ids=np.concatenate(self.completions).astype(np.int64),
            completion_index=np.concatenate(self.completion_index),
            num_completion_tokens=tuple(len(completion) for completion in self.completions),
        )


def _common_prompt(sequences: Sequence[TokenSequence]) -> NDArray[np.integer]:
    for sequence in sequences:
        assert 1 <= sequence.num_prompt_tokens <= len(sequence.token_ids), (
            f"found {sequence.num_prompt_tokens} prompt tokens of {len(sequence.token_ids)}, need at least one"
        )
    prompt, *others = (sequence.token_ids[: sequence.num_prompt_tokens] for sequence in sequences)
    assert all(np.array_equal(prompt, other) for other in others), "found two prompts in one piece, need one"
    return prompt
