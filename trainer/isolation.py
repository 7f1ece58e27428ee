"""The proof, when a policy is loaded, that a micro-batch gives each completion what it would have alone, and no more.

Layers that carry state along the row (linear attention, convolutions) leak from one sequence into the next, or lose the
prompt of a completion, without any sign of it in the loss. No list of models is kept: each is tried.

R, L = rows and their length, T = tokens of all rows, V = vocabulary, N = completion tokens.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from towline.storage.errors import ModelError
from towline.trainer.attention import NAME, batch_arguments, caps_scores, shares_prompts
from towline.trainer.packing import PackedBatch, TokenSequence, pack, pack_pieces
from towline.trainer.packing_rows import pad_rows

PIECES = ((4, (3, 2, 2)), (4, (1, 3)), (2, (3,)), (4, (1,)))
"""Tokens of prompts and completions: calls for one and for several, with prefixes and without. Few, since each change
is a forward: the 8 of them take 3 CPU seconds for 135 million parameters in float32, 8 in bf16."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Of a sequence's logits in a micro-batch against those alone, root mean square, relative: what rounding explains."""


@torch.no_grad()
def assert_isolated(model: Any) -> None:
    """Change the first prompt of a packed batch, then each of its completions, and look at what moves.

    A completion must move no logit of its siblings or of other groups, a prompt none of other groups, not by one bit;
    each must move its own. And logits of the second piece must be those of each of its sequences alone. A model that
    does not share prompts is asked the same about sequences that are each a piece of its own.

    Experts compute tokens of all sequences in shared matrix products, whose rounding depends on what else is there:
    with them logits may move as much as rounding explains, but their gradient by foreign tokens must be exactly 0.

    Raises:
        ModelError: naming the model type and why; or the model asks `varlen_attention`, in training, for what it
            refuses.
    """
    _refuse_lost_cap(model)
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
        reason = f"packed sequences: {_why(model)}; {_remedy(model)}"
        for changed, own in _changes(pieces[0]):
            _refuse_leak(model, batch, before_TV, changed, own, reason)
        alone_NV = torch.cat([_completion_logits(model, pack([sequence])) for sequence in pieces[1]])
        start = sum(batch.num_completion_tokens[: len(pieces[0])])
        packed_NV = before_TV[batch.logit_index[start : start + len(alone_NV)]]
        _refuse_other_logits(model, packed_NV, alone_NV, reason)
    finally:
        model.train(was_training)


@torch.no_grad()
def assert_rows_isolated(model: Any) -> None:
    """Change the padding of a batch of padded rows, then a whole row, and look at what moves: the same, for buckets.

    Raises:
        ModelError: naming the model type: it looks ahead, or mixes rows.
    """
    _refuse_lost_cap(model)
    sequences = [piece[0] for piece in _random_pieces(_vocabulary(model))]
    batch = pad_rows(sequences)
    assert batch.num_rows is not None
    length = len(batch.token_ids) // batch.num_rows
    shortest = min(range(len(sequences)), key=lambda row: len(sequences[row].token_ids))
    padding = slice(shortest * length + len(sequences[shortest].token_ids), (shortest + 1) * length)
    reason = "rows padded on the right: it looks ahead or mixes rows; take another model"
    was_training = model.training
    try:
        model.eval()
        before_TV = _logits(model, batch)
        for own in (padding, slice(0, length)):
            _refuse_leak(model, batch, before_TV, own, own, reason)
        alone_NV = torch.cat([_completion_logits(model, pad_rows([sequence])) for sequence in sequences])
        _refuse_other_logits(model, before_TV[batch.logit_index], alone_NV, reason)
    finally:
        model.train(was_training)


def _changes(piece: list[TokenSequence]) -> list[tuple[slice, slice]]:
    """Which tokens of the first piece to change, and all that may and must move then."""
    prompt = piece[0].num_prompt_tokens
    bounds = np.cumsum([prompt, *(len(sequence.token_ids) - prompt for sequence in piece)]).tolist()
    completions = [slice(start, end) for start, end in pairwise(bounds)]
    return [(slice(0, prompt), slice(0, bounds[-1])), *zip(completions, completions, strict=True)]


def _refuse_leak(model: Any, batch: PackedBatch, before_TV: Tensor, changed: slice, own: slice, reason: str) -> None:
    token_ids = batch.token_ids.copy()
    token_ids[changed] = (token_ids[changed] + 1) % _vocabulary(model)
    moved_T = (before_TV - _logits(model, batch, token_ids)).abs().amax(-1)
    if not moved_T[own].min() > 0:
        raise ModelError(
            f"model type {model.config.model_type}: changing a prompt or a completion of a micro-batch left some of "
            f"its own logits as they were, expected all to move: this model cannot be trained on {reason}"
        )
    moved_T[own] = 0
    has_experts = _has_experts(model)
    allowed = TOLERANCE[before_TV.dtype] * before_TV.abs().max().item() if has_experts else 0.0
    if has_experts and (reach := _reach(model, batch, changed, own)) != 0.0:
        raise ModelError(
            f"model type {model.config.model_type}: logits of one sequence of a micro-batch have a gradient of "
            f"{reach:.3g} by tokens of another, expected exactly 0: this model cannot be trained on {reason}"
        )
    if (leak := moved_T.max().item()) > allowed:
        raise ModelError(
            f"model type {model.config.model_type}: changing one sequence of a micro-batch moved logits of another by "
            f"{leak:.3g}, expected exactly 0: this model cannot be trained on {reason}"
        )


def _refuse_other_logits(model: Any, found_NV: Tensor, alone_NV: Tensor, reason: str) -> None:
    difference = ((found_NV - alone_NV).float().norm() / alone_NV.float().norm()).item()
    tolerance = TOLERANCE[alone_NV.dtype]
    if not difference <= tolerance:
        raise ModelError(
            f"model type {model.config.model_type}: logits of a micro-batch differ by {difference:.3g} of their size "
            f"from those of each sequence alone, expected at most {tolerance:g}: this model cannot be trained on "
            f"{reason}"
        )


def _refuse_lost_cap(model: Any) -> None:
    # Refused here because every comparison below would be between equally wrong logits.
    if caps_scores(model.config) and model.config._attn_implementation == "sdpa":
        raise ModelError(
            f"model type {model.config.model_type}: it caps its attention scores (attn_logit_softcapping), which sdpa "
            'leaves out without a word: load it with "eager", or take another model'
        )


def _why(model: Any) -> str:
    """What in its config explains that sequences of one row are not kept apart: the test has shown that much."""
    kinds: set[str] = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    stateful = sorted(kind for kind in kinds if not kind.endswith("attention") or kind.startswith("linear"))
    if stateful:
        return f"layers of type {', '.join(stateful)} carry state along the row"
    return "its layers carry state along the row, or have an attention that ignores where sequences begin"


@torch.enable_grad()
def _reach(model: Any, batch: PackedBatch, changed: slice, own: slice) -> float:
    """Largest gradient of logits outside `own` by the embeddings of the tokens in `changed`."""
    arguments = batch_arguments(batch, next(model.parameters()).device)
    embeddings = model.get_input_embeddings()(arguments.pop("input_ids")).detach().requires_grad_()
    logits_TV = model(inputs_embeds=embeddings, **arguments).logits.flatten(0, 1)
    # Random, or what is the same for all logits would cancel.
    upstream_TV = torch.randn(logits_TV.shape, generator=torch.Generator().manual_seed(0)).to(logits_TV)
    upstream_TV[own] = 0
    (gradient,) = torch.autograd.grad(logits_TV, embeddings, upstream_TV)
    return gradient.flatten(0, 1)[changed].abs().max().item()


def _has_experts(model: Any) -> bool:
    config = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(config, name, None) or 0) > 1 for name in names)


def _remedy(model: Any) -> str:
    if shares_prompts(model):
        return 'set trainer.packing = "buckets", which pads, or take another model'
    return f'load it with attn_implementation={NAME!r}, set trainer.packing = "buckets", which pads, or take another'


def _logits(model: Any, batch: PackedBatch, token_ids: np.ndarray | None = None) -> Tensor:
    """[T, V]"""
    device = next(model.parameters()).device
    arguments = batch_arguments(batch, device)
    if token_ids is not None:
        arguments["input_ids"] = torch.from_numpy(token_ids).to(device).view_as(arguments["input_ids"])
    return model(**arguments).logits.flatten(0, 1)


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
