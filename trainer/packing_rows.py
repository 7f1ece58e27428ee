"""The arrays of a micro-batch of padded rows, in the form of a packed one: the same forward, log-probs and loss."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from towline.trainer.packing import PackedBatch, TokenSequence, pack, pack_pieces

PADDING_TOKEN = 0
"""Any token will do: it comes after all that matters, and no model trained here looks ahead."""


def lay_out(pieces: Sequence[Sequence[TokenSequence]], *, is_padded: bool) -> PackedBatch:
    """Make the micro-batch that a plan asks for: `PackingPlan.is_padded`, and its pieces as lists of sequences."""
    if not is_padded:
        return pack_pieces(pieces)
    assert all(len(piece) == 1 for piece in pieces), "found a shared prompt, need a piece for each row"
    return pad_rows([piece[0] for piece in pieces])


def pad_rows(sequences: Sequence[TokenSequence]) -> PackedBatch:
    """Lay sequences out as rows of one length, padded on the right.

    `token_ids` and `position_ids` are [R x L], row by row, and `logit_index` and `completion_index` count through them.
    Nothing is one row: see `packing.pack_pieces`.
    """
    packed = pack(sequences)
    if not sequences:
        return replace(packed, num_rows=1)
    lengths = np.diff(packed.cu_seq_lens)
    length, rows = packed.max_length, np.arange(len(sequences))
    # Where each token of the packed row goes.
    shift = np.repeat(rows * length - packed.cu_seq_lens[:-1], lengths)
    places = np.arange(len(packed.token_ids)) + shift
    token_ids = np.full(len(rows) * length, PADDING_TOKEN, dtype=np.int64)
    token_ids[places] = packed.token_ids
    return replace(
        packed,
        token_ids=token_ids,
        position_ids=np.tile(np.arange(length), len(rows)),
        cu_seq_lens=(np.arange(len(rows) + 1) * length).astype(np.int32),
        logit_index=places[packed.logit_index],
        completion_index=places[packed.completion_index],
        num_rows=len(rows),
    )
