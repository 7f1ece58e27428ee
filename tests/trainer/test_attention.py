import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tiny_models import small_llama
from towline.storage.errors import ModelError
from towline.trainer import attention
from towline.trainer.attention import (
    CAUSAL_CALL_TOKENS,
    SHARED_CALL_TOKENS,
    batch_arguments,
    packed_arguments,
    varlen_attention,
)
from towline.trainer.packing import TokenSequence, pack_pieces


def some_sequences(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 300, (length,), generator=generator) for length in lengths]


def projections(lengths, dtype, num_heads=4, num_key_heads=2):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(lengths), 8) for heads in (num_heads, num_key_heads, num_key_heads)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return [tensor.to(dtype).requires_grad_() for tensor in tensors], bounds


@pytest.mark.parametrize("lengths", [[5], [3, 7, 2], [4, 4, 4, 9], [1, 1, 6, 6, 1]])
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_equals_each_sequence_alone_with_its_gradient(lengths, num_key_heads, dtype, tolerance):
    tensors, bounds = projections(lengths, dtype, num_key_heads=num_key_heads)
    found, _ = varlen_attention(torch.nn.Module(), *tensors, None, scaling=0.3, cu_seq_lens_q=bounds)
    alone = [
        scaled_dot_product_attention(*pieces, is_causal=True, scale=0.3, enable_gqa=True).transpose(1, 2)
        for pieces in zip(*(tensor.split(lengths, 2) for tensor in tensors), strict=True)
    ]
    wanted = torch.cat(alone, 1)
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(value, tensors, upstream) for value in (found, wanted)]
    torch.testing.assert_close(*gradients, rtol=tolerance, atol=tolerance)


def test_a_token_sees_its_own_sequence_up_to_itself():
    (query, key, value), bounds = projections([2, 3], torch.float64)
    found, _ = varlen_attention(torch.nn.Module(), query, key, value, None, cu_seq_lens_q=bounds)
    for token, visible in enumerate([[0], [0, 1], [2], [2, 3], [2, 3, 4]]):
        gradient = torch.autograd.grad(found[0, token].sum(), value, retain_graph=True)[0]
        assert gradient.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == visible


PIECES = [
    [(5, [3])],
    [(4, [2, 2, 2])],
    [(3, [1, 6, 2, 9]), (3, [1, 6]), (7, [4])],
    [(2, [SHARED_CALL_TOKENS // 2] * 4 + [SHARED_CALL_TOKENS + 1, 1])],
    [(3, [2, CAUSAL_CALL_TOKENS]), (2, [1, CAUSAL_CALL_TOKENS + 1, 3])],
]
"""Lists of (prompt tokens, tokens of its completions); the last two fill several calls."""


def shared_projections(pieces, dtype, num_key_heads=2):
    """Projections of a row, its bounds and prefixes; and for each completion the places of its prompt and its own."""
    bounds, prefixes, places = [0], [], []
    for prompt, completions in pieces:
        start = bounds[-1]
        end = start + prompt
        for number, length in enumerate(completions):
            places.append([*range(start, start + prompt), *range(end, end + length)])
            prefixes.append([start, prompt] if number else [0, 0])
            end += length
            bounds.append(end)
    tensors, _ = projections([bounds[-1]], dtype, num_key_heads=num_key_heads)
    return tensors, torch.tensor(bounds, dtype=torch.int32), torch.tensor(prefixes, dtype=torch.int32), places


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("num_key_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_completions_of_one_prompt_equal_each_alone_with_its_gradient(pieces, num_key_heads, dtype, tolerance):
    tensors, bounds, prefixes, places = shared_projections(pieces, dtype, num_key_heads)
    found, _ = varlen_attention(torch.nn.Module(), *tensors, None, scaling=0.3, cu_seq_lens_q=bounds, prefixes=prefixes)
    wanted = torch.empty_like(found)
    for place in places:
        alone = [tensor[:, :, place] for tensor in tensors]
        output = scaled_dot_product_attention(*alone, is_causal=True, scale=0.3, enable_gqa=True)
        # The prompt's tokens are those of its last completion: they are the same in all.
        wanted = wanted.index_copy(1, torch.tensor(place), output.transpose(1, 2))
    assert found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(wanted)
    gradients = [torch.autograd.grad(value, tensors, upstream) for value in (found, wanted)]
    if dtype is not torch.bfloat16:
        torch.testing.assert_close(*gradients, rtol=tolerance * 10, atol=tolerance * 10)


def test_a_token_sees_the_prompt_and_its_own_completion_up_to_itself():
    (query, key, value), bounds, prefixes, _ = shared_projections([(1, [1]), (2, [1, 2, 1])], torch.float64)
    found, _ = varlen_attention(torch.nn.Module(), query, key, value, None, cu_seq_lens_q=bounds, prefixes=prefixes)
    visible = [[0], [0, 1], [2], [2, 3], [2, 3, 4], [2, 3, 5], [2, 3, 5, 6], [2, 3, 7]]
    for token, wanted in enumerate(visible):
        gradient = torch.autograd.grad(found[0, token].sum(), value, retain_graph=True)[0]
        assert gradient.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == wanted


def count_calls(monkeypatch):
    calls = []

    def counting(query, *arguments, **options):
        calls.append(tuple(query.shape[::2]))
        return scaled_dot_product_attention(query, *arguments, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", counting)
    return calls


def test_neighbours_of_equal_length_share_one_call(monkeypatch):
    calls = count_calls(monkeypatch)
    tensors, bounds = projections([4, 4, 4, 9, 4], torch.float32)
    varlen_attention(torch.nn.Module(), *tensors, None, cu_seq_lens_q=bounds)
    assert calls == [(3, 4), (1, 9), (1, 4)]


def test_completions_of_one_prompt_share_calls_up_to_a_number_of_tokens(monkeypatch):
    calls = count_calls(monkeypatch)
    monkeypatch.setattr(attention, "SHARED_CALL_TOKENS", 8)
    tensors, bounds, prefixes, _ = shared_projections([(2, [1, 3, 5, 1, 9, 2]), (2, [1, 3])], torch.float32)
    varlen_attention(torch.nn.Module(), *tensors, None, cu_seq_lens_q=bounds, prefixes=prefixes)
    # prompt and first completion | 3 + 5 | 1 | 9 is over the limit | 2 | another prompt | 3
    assert calls == [(1, 3), (1, 8), (1, 1), (1, 9), (1, 2), (1, 3), (1, 3)]


def test_a_long_completion_is_computed_behind_its_prompt_without_a_mask(monkeypatch):
    calls = count_calls(monkeypatch)
    monkeypatch.setattr(attention, "CAUSAL_CALL_TOKENS", 9)
    monkeypatch.setattr(attention, "SHARED_CALL_TOKENS", 8)
    tensors, bounds, prefixes, _ = shared_projections([(4, [1, 8, 9, 12]), (5, [1, 9])], torch.float32)
    varlen_attention(torch.nn.Module(), *tensors, None, cu_seq_lens_q=bounds, prefixes=prefixes)
    # 8 is too short, 9 is long and twice 4, but not twice 5
    assert calls == [(1, 5), (1, 8), (1, 13), (1, 16), (1, 6), (1, 9)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sliding_window": 4}, "sliding_window=4"),
        ({"softcap": 50.0}, "softcap=50.0"),
        ({"s_aux": torch.ones(4)}, "asks for s_aux,"),
        ({"position_bias": torch.ones(4)}, "asks for position_bias,"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "is_causal=False"),
        ({"cu_seq_lens_q": None}, "packed_arguments"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, named):
    tensors, bounds = projections([2, 3], torch.float32)
    with pytest.raises(ModelError, match=named):
        varlen_attention(torch.nn.Module(), *tensors, None, **{"cu_seq_lens_q": bounds, **options})


def test_a_mask_and_several_rows_are_refused():
    tensors, bounds = projections([2, 3], torch.float32)
    with pytest.raises(ModelError, match="an attention mask"):
        varlen_attention(torch.nn.Module(), *tensors, torch.ones(1, 5), cu_seq_lens_q=bounds)
    rows = [torch.cat([tensor, tensor]) for tensor in tensors]
    with pytest.raises(ModelError, match=r"2 row\(s\)"):
        varlen_attention(torch.nn.Module(), *rows, None, cu_seq_lens_q=bounds)


def test_none_for_an_unsupported_argument_is_no_request():
    tensors, bounds = projections([2, 3], torch.float32)
    varlen_attention(torch.nn.Module(), *tensors, None, cu_seq_lens_q=bounds, sliding_window=None, softcap=None)


def parameter_gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_packed_logits_and_gradients_equal_unpacked_ones(checkpointing):
    sequences = some_sequences([9, 5, 5, 14])
    packed, alone = small_llama().train(), small_llama("sdpa").train()
    if checkpointing is not None:
        packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    found_TV = packed(**packed_arguments(sequences)).logits[0]
    wanted_TV = torch.cat([alone(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences])
    torch.testing.assert_close(found_TV, wanted_TV, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(found_TV.shape, generator=torch.Generator().manual_seed(1))
    found = parameter_gradients(packed, (found_TV * upstream).sum())
    wanted = parameter_gradients(alone, (wanted_TV * upstream).sum())
    largest = max(gradient.abs().max() for gradient in wanted.values())
    assert max((found[name] - wanted[name]).abs().max() for name in wanted) < 1e-5 * largest


def test_packed_logits_equal_unpacked_ones_in_bf16():
    sequences = some_sequences([9, 5, 5, 14])
    packed, alone = small_llama().bfloat16(), small_llama("sdpa").bfloat16()
    wanted_TV = torch.cat([alone(input_ids=ids[None], use_cache=False).logits[0] for ids in sequences])
    found_TV = packed(**packed_arguments(sequences)).logits[0]
    torch.testing.assert_close(found_TV, wanted_TV, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_logits_of_completions_of_one_prompt_equal_those_of_each_alone(dtype, tolerance):
    prompt, *completions = some_sequences([6, 4, 1, 4, 11])
    sequences = [torch.cat([prompt, completion]) for completion in completions]
    model, alone = small_llama().to(dtype), small_llama("sdpa").to(dtype)
    batch = pack_pieces([[TokenSequence(token_ids=ids.numpy(), num_prompt_tokens=6) for ids in sequences]])
    found_NV = model(**batch_arguments(batch, torch.device("cpu"))).logits[0, batch.logit_index]
    wanted_NV = torch.cat([alone(input_ids=ids[None], use_cache=False).logits[0, 5:-1] for ids in sequences])
    torch.testing.assert_close(found_NV, wanted_NV, rtol=tolerance, atol=tolerance)


def test_a_row_without_prefixes_passes_none():
    # flash_attention_2 does not know them
    assert "prefixes" not in packed_arguments(some_sequences([3, 4]))
