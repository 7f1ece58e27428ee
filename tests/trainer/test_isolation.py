import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from tiny_models import SMALL, VARLEN, small_llama
from towline.storage.errors import ModelError
from towline.trainer.attention import packed_arguments
from towline.trainer.isolation import PIECES, assert_isolated


def after_decoder(model, change):
    """Change its last hidden states [1, T, D], as a layer would that carries state along the row."""
    model.model.norm.register_forward_hook(lambda module, arguments, hidden: change(hidden))
    return model


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_packed_llama_is_isolated(dtype):
    model = small_llama().to(dtype).train()
    assert_isolated(model)
    assert model.training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_that_share_nothing_are_isolated_under_the_attention_of_transformers(dtype):
    # only as long as no cache exists: its packed mask disappears with one
    assert_isolated(small_llama("sdpa").to(dtype))


def test_a_model_with_a_sliding_window_is_refused():
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4, attn_implementation=VARLEN))
    with pytest.raises(ModelError, match="MistralAttention asks for sliding_window=4"):
        assert_isolated(model)


def test_a_model_without_its_sliding_window_is_accepted():
    assert_isolated(MistralForCausalLM(MistralConfig(**SMALL, sliding_window=None, attn_implementation=VARLEN)))


def test_a_model_with_attention_dropout_is_refused_in_training():
    model, arguments = small_llama(attention_dropout=0.1), packed_arguments([torch.arange(3), torch.arange(4)])
    with pytest.raises(ModelError, match=r"dropout=0\.1"):
        model.train()(**arguments)
    model.eval()(**arguments)
    with pytest.raises(ModelError, match=r"dropout=0\.1"):
        assert_isolated(model)
    assert not model.training


def test_one_row_without_bounds_between_sequences_leaks_and_is_refused():
    model = small_llama("sdpa")
    forward = model.forward
    model.forward = lambda **arguments: forward(input_ids=arguments["input_ids"])
    with pytest.raises(ModelError, match=r"model type llama: .* moved logits of another"):
        assert_isolated(model)


def test_a_model_that_carries_state_along_the_row_is_refused():
    # as linear attention does
    model = after_decoder(small_llama(), lambda hidden: hidden + 1e-3 * hidden.cumsum(1))
    with pytest.raises(ModelError, match="cannot be trained on packed sequences"):
        assert_isolated(model)


PROMPT, FIRST = PIECES[0][0], PIECES[0][1][0]


def test_a_completion_that_reaches_its_sibling_is_refused():
    def leak(hidden):
        hidden = hidden.clone()
        hidden[0, PROMPT + FIRST] += 1e-3 * hidden[0, PROMPT + FIRST - 1]
        return hidden

    with pytest.raises(ModelError, match="moved logits of another"):
        assert_isolated(after_decoder(small_llama(), leak))


def test_a_completion_that_its_prompt_does_not_reach_is_refused():
    def lose_prompt(hidden):
        hidden = hidden.clone()
        hidden[0, PROMPT + FIRST] = torch.arange(64.0)
        return hidden

    with pytest.raises(ModelError, match="left some of its own logits as they were"):
        assert_isolated(after_decoder(small_llama(), lose_prompt))


def test_layers_that_start_afresh_at_each_segment_are_refused():
    """A running mean that knows where segments begin isolates them, yet a completion loses its prompt there."""
    model = small_llama()
    bounds = []
    model.model.register_forward_pre_hook(
        lambda module, arguments, options: bounds.append(options["cu_seq_lens_q"].tolist()), with_kwargs=True
    )

    def running_mean(hidden):
        segments = hidden.split(torch.tensor(bounds[-1]).diff().tolist(), 1)
        means = [part.cumsum(1) / torch.arange(1, part.shape[1] + 1)[:, None] for part in segments]
        return hidden + torch.cat(means, 1)

    with pytest.raises(ModelError, match=r"differ by .* from those of each sequence alone"):
        assert_isolated(after_decoder(model, running_mean))
