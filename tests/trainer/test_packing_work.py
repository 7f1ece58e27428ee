import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM

from towline.trainer.packing_work import WorkModel, work_model

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}


def tiny_llama(**options):
    return LlamaForCausalLM(
        LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager", **options)
    )


def pairs_seen(prompt, completions):
    """Count them one by one."""
    count = sum(place + 1 for place in range(prompt))
    return count + sum(prompt + place + 1 for length in completions for place in range(length))


@pytest.mark.parametrize(("prompt", "completions"), [(1, []), (5, [3]), (4, [2, 7, 0, 1])])
def test_work_of_a_piece_counts_the_tokens_that_each_token_sees(prompt, completions):
    work = WorkModel(per_token=1000, per_pair=7, per_target=100_000)
    targets = sum(completions)
    wanted = 1000 * (prompt + targets) + 7 * pairs_seen(prompt, completions) + 100_000 * targets
    assert work.piece(prompt, completions) == wanted


def test_a_row_is_worked_through_to_its_end():
    work = WorkModel(per_token=10, per_pair=1, per_target=100)
    assert work.row(6, 2) == 60 + 21 + 200
    assert work.row(6, 2) == work.piece(4, [2])


@pytest.mark.parametrize("tied", [True, False])
def test_work_equals_the_operations_that_torch_counts(tied):
    model, length = tiny_llama(tie_word_embeddings=tied), 48
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(length)[None], use_cache=False).logits.sum().backward()
    work = work_model(model)
    # Eager attention computes all pairs; the head is not computed again here.
    estimate = work.per_token * length + work.per_pair * length**2 + work.per_target * 6 // 8 * length
    assert estimate == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_a_frozen_weight_costs_no_gradient_of_its_own():
    model = tiny_llama(tie_word_embeddings=False)
    whole = work_model(model)
    model.requires_grad_(False)
    frozen = work_model(model)
    assert (frozen.per_token, frozen.per_target) == (whole.per_token * 4 // 6, whole.per_target * 6 // 8)
    assert frozen.per_pair == whole.per_pair


def test_a_model_without_attention_heads_has_no_pairs():
    work = work_model(MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=1)))
    assert work.per_pair == 0
    assert work.per_token > 0
    assert work.per_target == 8 * 300 * 64
