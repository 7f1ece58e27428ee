"""The proof, when a policy is loaded, that packing gives each completion what it would have alone, and nothing else.

Layers that carry state along the row (linear attention, convolutions) leak from one sequence into the next, or lose the
prompt of a completion, without any sign of it in the loss.

T = tokens of the row, V = vocabulary, N = completion tokens.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from towline.storage.errors import ModelError
from towline.trainer.attention import NAME, batch_arguments, shares_prompts
from towline.trainer.packing import PackedBatch, TokenSequence, pack, pack_pieces

PIECES = ((4, (3, 2, 2)), (4, (1, 3)), (2, (3,)), (4, (1,)))
"""Tokens of prompts and completions: calls for one and for several, with prefixes and without. Few, since each change
is a forward: the 8 of them take 3 CPU seconds for 135 million parameters in float32, 8 in bf16."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Of packed logits against each sequence's alone, root mean square, relative: what rounding explains."""


@torch.no_grad()
def assert_isolated(model: Any) -> None:
    """Change the first prompt of a packed batch, then each of its completions, and look at what moves.

    A completion must move no logit of its siblings or of other groups, a prompt none of other groups, not by one bit;
    each must move its own. And logits of the second piece must be those of each of its sequences alone. A model that
    does not share prompts is asked the same about sequences that are each a piece of its own.

    Raises:
        ModelError: naming the model type; or the model asks `varlen_attention`, in training, for what it refuses.
    """
    pieces = _random_pieces(_vocabulary(model))
    if not shares_prompts(model):
        pieces = [[sequence] for piece in pieces for sequence in piece]
    batch = pack_pieces(pieces)
    was_training = model.training
    try:
        # Attention dropout is asked for in training only: refused here, not hours later at the first step.
        _logits(model.train(), batch)
        model.eval()
        before_TV = _logits(model, batch)
        for changed, own in _changes(pieces[0]):
            token_ids = batch.token_ids.copy()
            token_ids[changed] = (token_ids[changed] + 1) % _vocabulary(model)
            _refuse_leak(model, before_TV, _logits(model, batch, token_ids), own)
        alone_NV = torch.cat([_completion_logits(model, pack([sequence])) for sequence in pieces[1]])
        start = sum(batch.num_completion_tokens[: len(pieces[0])])
        _refuse_other_logits(model, before_TV[batch.logit_index[start : start + len(alone_NV)]], alone_NV)
    finally:
        model.train(was_training)


def _changes(piece: list[TokenSequence]) -> list[tuple[slice, slice]]:
    """Which tokens of the first piece to change, and all that may and must move then."""
    prompt = piece[0].num_prompt_tokens
    bounds = np.cumsum([prompt, *(len(sequence.token_ids) - prompt for sequence in piece)]).tolist()
    completions = [slice(start, end) for start, end in pairwise(bounds)]
    return [(slice(0, prompt), slice(0, bounds[-1])), *zip(completions, completions, strict=True)]


def _refuse_leak(model: Any, before_TV: Tensor, after_TV: Tensor, own: slice) -> None:
    moved_T = (before_TV - after_TV).abs().amax(-1)
    if not moved_T[own].min() > 0:
        raise ModelError(
            f"model type {model.config.model_type}: changing a prompt or a completion of a packed batch left some of "
            f"its own logits as they were, expected all to move: this model cannot be trained on packed sequences; "
            f"{_remedy()}"
        )
    moved_T[own] = 0
    if (leak := moved_T.max().item()) != 0.0:
        raise ModelError(
            f"model type {model.config.model_type}: changing one sequence of a packed batch moved logits of another by "
            f"{leak:.3g}, expected exactly 0: this model cannot be trained on packed sequences; {_remedy()}"
        )


def _refuse_other_logits(model: Any, packed_NV: Tensor, alone_NV: Tensor) -> None:
    difference = ((packed_NV - alone_NV).float().norm() / alone_NV.float().norm()).item()
    tolerance = TOLERANCE[alone_NV.dtype]
    if not difference <= tolerance:
        raise ModelError(
            f"model type {model.config.model_type}: logits of packed sequences differ by {difference:.3g} of their "
            f"size from those of each sequence alone, expected at most {tolerance:g}: this model cannot be trained on "
            f"packed sequences; {_remedy()}"
        )


def _remedy() -> str:
    return f"load it with attn_implementation={NAME!r}, or take another model"


def _logits(model: Any, batch: PackedBatch, token_ids: np.ndarray | None = None) -> Tensor:
    """[T, V]"""
    device = next(model.parameters()).device
    arguments = batch_arguments(batch, device)
    if token_ids is not None:
        arguments["input_ids"] = torch.from_numpy(token_ids)[None].to(device)
    return model(**arguments).logits[0]


def _completion_logits(model: Any, batch: PackedBatch) -> Tensor:
    """[N, V]"""
    return _logits(model, batch)[batch.logit_index]


def _random_pieces(vocabulary: int) -> list[list[TokenSequence]]:
    generator = np.random.default_rng(0)
    pieces: list[list[TokenSequence]] = []
    for num_prompt_tokens, completions in PIECES:
        prompt = generator.integers(0, vocabulary, num_prompt_tokens)
        pieces.append(
            [
                TokenSequence(
                    token_ids=np.concatenate([prompt, generator.integers(0, vocabulary, length)]),
                    num_prompt_tokens=num_prompt_tokens,
                )
                for length in completions
            ]
        )
    return pieces


def _vocabulary(model: Any) -> int:
    return int(model.config.get_text_config().vocab_size)
