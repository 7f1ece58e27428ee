import numpy as np
import pytest
import torch

from tiny_models import VARLEN, small_llama
from towline.storage.errors import ModelError
from towline.trainer.attention import batch_arguments
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.packing_rows import PADDING_TOKEN, lay_out, pad_rows
from towline.trainer.policy import Policy


def sequence(*token_ids, prompt):
    return TokenSequence(token_ids=np.array(token_ids, dtype=np.int32), num_prompt_tokens=prompt)


THREE = [sequence(10, 11, 12, 13, prompt=2), sequence(20, 21, prompt=1), sequence(30, 31, 32, prompt=1)]


def test_rows_by_hand():
    batch = pad_rows(THREE)
    assert PADDING_TOKEN == 0
    assert batch.num_rows == 3
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 20, 21, 0, 0, 30, 31, 32, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3] * 3
    assert batch.cu_seq_lens.tolist() == [0, 4, 8, 12]
    assert batch.max_length == 4
    assert batch.logit_index.tolist() == [1, 2, 4, 8, 9]
    assert batch.target_ids.tolist() == [12, 13, 21, 31, 32]
    assert batch.completion_index.tolist() == [2, 3, 5, 9, 10]
    assert batch.last_index.tolist() == [3, 5, 10]
    assert batch.num_completion_tokens == (2, 1, 2)
    assert not batch.shares_prompts


def test_padding_is_no_target_whatever_the_completion_ends_with():
    # G3-20: 5, 6 without an end-of-text token (2) beside a longer row, and a completion that ends in the padding token
    batch = pad_rows([sequence(7, 5, 6, prompt=1), sequence(7, 5, 6, 8, 2, prompt=1), sequence(7, 5, 0, prompt=1)])
    assert batch.token_ids.tolist() == [7, 5, 6, 0, 0, 7, 5, 6, 8, 2, 7, 5, 0, 0, 0]
    assert batch.target_ids.tolist() == [5, 6, 5, 6, 8, 2, 5, 0]
    assert batch.num_completion_tokens == (2, 4, 2)


def test_values_of_tokens_lie_as_those_of_a_packed_batch():
    values = [np.array([1.0, 2.0]), np.array([3.0]), np.array([4.0, 5.0])]
    assert pad_rows(THREE).gather(values).tolist() == pack(THREE).gather(values).tolist()
    assert pad_rows(THREE).spread([1, 2, 3]).tolist() == [1, 1, 2, 3, 3]


def test_a_completion_without_tokens_is_a_row_without_targets():
    batch = pad_rows([sequence(1, 2, prompt=2), sequence(3, 4, 5, prompt=1)])
    assert batch.token_ids.tolist() == [1, 2, 0, 3, 4, 5]
    assert (batch.logit_index.tolist(), batch.num_completion_tokens) == ([3, 4], (0, 2))


def test_nothing_is_a_row_without_targets():
    batch = pad_rows([])
    assert (batch.num_rows, batch.token_ids.tolist()) == (1, [0, 0])
    assert len(batch.logit_index) == len(batch.gather([])) == 0


def test_a_plan_says_which_is_made():
    pieces = [[item] for item in THREE]
    assert lay_out(pieces, is_padded=True).num_rows == 3
    assert lay_out(pieces, is_padded=False).num_rows is None
    with pytest.raises(AssertionError, match="shared prompt"):
        lay_out([[THREE[0], THREE[0]]], is_padded=True)


def test_a_model_gets_rows_without_mask_bounds_or_cache():
    # A mask costs time and hides nothing; bounds would be taken for those of one packed row.
    arguments = batch_arguments(pad_rows(THREE), torch.device("cpu"))
    assert arguments.pop("input_ids").tolist() == [[10, 11, 12, 13], [20, 21, 0, 0], [30, 31, 32, 0]]
    assert arguments == {"attention_mask": None, "use_cache": False}


def tiny_llama(attention):
    return small_llama(attention, initializer_range=0.06)


def losses_and_gradient(policy, batches, upstream):
    total = 0.0
    for batch, weights in zip(batches, upstream, strict=True):
        loss = (policy(batch)[0] * weights).sum()
        loss.backward()
        total += loss.item()
    return total, torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_loss_and_gradient_of_buckets_equal_packed_ones(implementation):
    rng = np.random.default_rng(0)
    sequences = [
        TokenSequence(token_ids=rng.integers(0, 300, length), num_prompt_tokens=4)
        for length in (30, 30, 29, 28, 12, 11, 11, 5)
    ]
    buckets = [sequences[:4], sequences[4:7], sequences[7:], []]
    weights = [torch.randn(sum(len(item.token_ids) - 4 for item in bucket)) for bucket in buckets]
    found = losses_and_gradient(Policy(tiny_llama(implementation), 1.0), map(pad_rows, buckets), weights)
    wanted = losses_and_gradient(Policy(tiny_llama(VARLEN), 1.0), [pack(sequences)], [torch.cat(weights)])
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert (found[1] - wanted[1]).norm() <= 1e-5 * wanted[1].norm()


def test_an_attention_for_packed_rows_refuses_padded_ones():
    with pytest.raises(ModelError, match=r'trainer\.packing = "buckets"'):
        Policy(tiny_llama(VARLEN), 1.0)(pad_rows(THREE))
