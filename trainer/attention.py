"""Attention over a packed batch: segments laid end to end in one row, none of which sees another but for its prefix.

A segment without a prefix is a sequence; runs of neighbours of equal length share a call, without a mask. Segments with
a prefix are completions of one prompt, which is computed once for all of them; short ones share a call, whose mask
keeps them apart. One call with a mask for the whole row would compute all T x T scores, and transformers' own packed
mask silently disappears once a cache exists or an attention mask is passed.

B = 1 row, H = heads, T = tokens of the row, K = head dim, S = segments; L = tokens of one segment or call.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from towline.storage.errors import ModelError
from towline.trainer.packing import PackedBatch, TokenSequence, pack

NAME = "towline_varlen"
"""For `attn_implementation=`."""

SHARED_CALL_TOKENS = 128
"""Completions of one prompt share a call up to so many tokens. Forward and backward of 9 heads on one CPU core: 8 of 4
to 16 tokens take 4 ms in one call, 9 ms with a call each, 8 ms padded to one length; 8 of 50 to 300 tokens take 680 ms
in one call, 135 ms with a call each, 170 ms padded."""

CAUSAL_CALL_TOKENS = 512
"""A completion of at least so many tokens, and twice its prompt's, is computed behind the prompt once more and without
a mask, of which nothing above the diagonal is computed. Behind a prompt of 400 tokens, on the same core: 800 take 104
ms, 108 ms with a mask; 1,600 take 258 and 365 ms; 4,000 take 1.2 and 2.1 s."""

UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Arguments by which a model asks for more than causal attention. Ignoring one gives another model."""


def register_varlen_attention() -> str:
    """Make `NAME` known to transformers, and return it. Calling it again does no harm."""
    AttentionInterface.register(NAME, varlen_attention)
    return NAME


def varlen_attention(
    module: torch.nn.Module,
    query_BHTK: Tensor,
    key_BHTK: Tensor,
    value_BHTK: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    prefixes: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each segment, after all of its prefix. The signature is that of transformers.

    Args:
        key_BHTK: H may be smaller than the query's (grouped-query attention).
        cu_seq_lens_q: [S + 1] int32, the first token of each segment, then T. Best on the CPU: every layer reads it,
            and on a GPU each reading waits for all the work in the queue.
        prefixes: [S, 2] int32 on the CPU, first token and length of each segment's prefix: the beginning of another
            segment, or (0, 0). None for no prefixes at all.

    Returns:
        [B, T, H, K], and no attention weights.

    Raises:
        ModelError: the model asks for something that is not done here.
    """
    _refuse_unsupported(module, attention_mask, dropout=dropout, is_causal=is_causal, others=others)
    if cu_seq_lens_q is None or query_BHTK.shape[0] != 1:
        raise ModelError(
            f"{NAME} was given {query_BHTK.shape[0]} row(s) and cu_seq_lens_q {cu_seq_lens_q}, expected one row and "
            "the bounds of its sequences: call the model with attention.packed_arguments(...), or load it for padded "
            'rows (trainer.packing = "buckets") with an attention of transformers'
        )
    bounds: list[int] = cu_seq_lens_q.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    sees = [(0, 0)] * len(lengths) if prefixes is None else [(start, length) for start, length in prefixes.tolist()]
    # Cut once: backward then joins once, where each slice of its own would fill a row with zeros.
    queries, keys, values = (tensor[0].split(lengths, 1) for tensor in (query_BHTK, key_BHTK, value_BHTK))
    options: dict[str, Any] = {"scale": scaling, "enable_gqa": query_BHTK.shape[1] != key_BHTK.shape[1]}
    outputs_HLK: list[Tensor] = []
    for own in _calls(lengths, sees):
        start, length = sees[own.start]
        if length == 0 and own.stop - own.start == 1:
            query, key, value = (parts[own.start][None] for parts in (queries, keys, values))
            outputs_HLK.append(scaled_dot_product_attention(query, key, value, is_causal=True, **options)[0])
        elif length == 0:
            query, key, value = (torch.stack(parts[own]) for parts in (queries, keys, values))
            outputs_HLK += scaled_dot_product_attention(query, key, value, is_causal=True, **options).unbind()
        else:
            home = bounds.index(start)
            query = torch.cat(queries[own], 1)[None]
            key, value = (torch.cat([parts[home][:, :length], *parts[own]], 1)[None] for parts in (keys, values))
            if query.shape[2] >= max(CAUSAL_CALL_TOKENS, 2 * length) and own.stop - own.start == 1:
                query = torch.cat([queries[home][:, :length][None], query], 2)
                output = scaled_dot_product_attention(query, key, value, is_causal=True, **options)
                outputs_HLK += output[:, :, length:].unbind()
                continue
            mask = _completion_mask(length, lengths[own], query.device)
            outputs_HLK += scaled_dot_product_attention(query, key, value, attn_mask=mask, **options).unbind()
    return torch.cat(outputs_HLK, 1).transpose(0, 1).unsqueeze(0).contiguous(), None


def _calls(lengths: list[int], prefixes: list[tuple[int, int]]) -> Iterator[slice]:
    """Neighbours that share a call: of equal length if they have no prefix, of one prompt if they have."""
    first = 0
    for number in range(1, len(lengths) + 1):
        if number < len(lengths) and prefixes[number] == prefixes[first]:
            if prefixes[first][1] == 0 and lengths[number] == lengths[first]:
                continue
            if prefixes[first][1] > 0 and sum(lengths[first : number + 1]) <= SHARED_CALL_TOKENS:
                continue
        yield slice(first, number)
        first = number


def _completion_mask(prefix_length: int, lengths: list[int], device: torch.device) -> Tensor:
    """[L, prefix_length + L] bool, true where a token of a completion may look: the prompt, and its own past."""
    completion_L = torch.repeat_interleave(torch.tensor(lengths, device=device))
    past_LL = (completion_L[:, None] == completion_L).tril()
    return torch.cat([past_LL.new_ones(len(completion_L), prefix_length), past_LL], 1)


def _refuse_unsupported(
    module: torch.nn.Module, attention_mask: Tensor | None, *, dropout: float, is_causal: bool | None, others: Any
) -> None:
    asked = {name: others[name] for name in UNSUPPORTED if others.get(name) is not None}
    found = [name if isinstance(value, Tensor) else f"{name}={value}" for name, value in asked.items()]
    if dropout > 0:
        found.append(f"dropout={dropout}")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        found.append("is_causal=False")
    if attention_mask is not None:
        found.append("an attention mask")
    if found:
        raise ModelError(
            f"{type(module).__name__} asks for {', '.join(found)}, expected plain causal attention: {NAME} does not "
            'support this; set trainer.packing = "buckets", which pads, take a model without it, or set it off in the '
            "model's config.json if the model allows that"
        )


def shares_prompts(model: Any) -> bool:
    """Whether the model was loaded with an attention that knows prefixes: `NAME` alone does."""
    return model.config._attn_implementation == NAME


def caps_scores(config: Any) -> bool:
    """Whether a model's config asks for soft-capped attention scores. transformers' "sdpa" leaves them out silently."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def packed_arguments(sequences: Sequence[Tensor]) -> dict[str, Any]:
    """Arguments of a transformers model for these sequences as one row, none of which shares anything.

    Args:
        sequences: token ids, each [tokens], all on the model's device.
    """
    numpy_sequences = [sequence.cpu().numpy() for sequence in sequences]
    batch = pack([TokenSequence(token_ids=ids, num_prompt_tokens=len(ids)) for ids in numpy_sequences])
    return batch_arguments(batch, sequences[0].device)


def batch_arguments(batch: PackedBatch, device: torch.device) -> dict[str, Any]:
    """Arguments of a transformers model on `device` for a packed batch, or for padded rows.

    Without `use_cache=False` most implementations would see across sequences. Prefixes are passed only if there are
    any: to an attention that does not know them a batch must not have any.

    Padded rows need no mask: padding comes last, and a causal model never looks there. Nor do they get bounds, which
    layers might take for those of one packed row.
    """
    if batch.num_rows is not None:
        rows = torch.from_numpy(batch.token_ids).view(batch.num_rows, -1).to(device)
        return {"input_ids": rows, "attention_mask": None, "use_cache": False}
    bounds = torch.from_numpy(batch.cu_seq_lens).to(device)
    arguments = {
        "input_ids": torch.from_numpy(batch.token_ids)[None].to(device),
        "position_ids": torch.from_numpy(batch.position_ids)[None].to(device),
        "attention_mask": None,
        "use_cache": False,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": batch.max_length,
        "max_length_k": batch.max_length,
    }
    return arguments | {"prefixes": torch.from_numpy(batch.prefixes)} if batch.shares_prompts else arguments
