"""What becomes of transformers' model types, each tiny and with random weights, when it is loaded as a policy.

`None` is accepted; otherwise a part of the refusal. Those that packing refuses for their layers, buckets accept. What
changes logits after the decoder is refused by `logprobs.check_head` whatever the packing.
"""

import re

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tiny_models import SMALL, VARLEN
from towline.storage.errors import ModelError
from towline.trainer.attention import batch_arguments
from towline.trainer.isolation import assert_isolated, assert_rows_isolated
from towline.trainer.packing import TokenSequence, pack, pack_pieces
from towline.trainer.packing_rows import pad_rows
from towline.trainer.policy import Policy, load_policy

SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
OPTIONS = {
    "gemma2": {"head_dim": 32, "final_logit_softcapping": 0.5},
    "granite": {"logits_scaling": 4.0},
    "gemma3_text": {"head_dim": 32, "sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "qwen2 with a window": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, "head_dim": 32, "moe_intermediate_size": 32},
    "bamba": {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_head": 32},
    "gpt_oss": {**EXPERTS, "head_dim": 32, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0},
    "gpt2": {"attn_pdrop": 0.1},
    "mamba2": {"head_dim": 16, "num_heads": 8, "n_groups": 1, "state_size": 16},
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16,
        "head_dim": 32,
    },
    "qwen3_next": {
        **EXPERTS, **LINEAR, "head_dim": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
"""Beyond SMALL."""

CARRIES_STATE = r"layers of type {} carry state along the row.*trainer\.packing = \"buckets\""
OF_ITS_OWN = r"an attention that ignores where sequences begin"

MODELS = {
    "llama": (None, None),
    "qwen2": (None, None),
    "qwen3": (None, None),
    "phi3": (None, None),
    "olmo2": (None, None),
    "smollm3": (None, None),
    "gpt_neox": (None, None),
    "opt": (None, None),
    "mistral": (r"asks for sliding_window=4.*trainer\.packing = \"buckets\"", None),
    "qwen2 with a window": ("asks for sliding_window=4", None),
    "gemma3_text": ("asks for sliding_window=4", None),
    "cohere2": ("asks for sliding_window", None),
    "gemma2": (r"softcap=50\.0", None),
    "granite": (None, None),
    "gpt2": (r"dropout=0\.1", None),
    "gpt_oss": ("asks for .*s_aux", None),
    "mixtral": (None, None),
    "qwen3_moe": (None, None),
    "mamba": (CARRIES_STATE.format("linear_attention"), None),
    "mamba2": (CARRIES_STATE.format("linear_attention"), None),
    "falcon_h1": (CARRIES_STATE.format(".*"), None),
    "bamba": (CARRIES_STATE.format("linear_attention"), None),
    "qwen3_next": (CARRIES_STATE.format("linear_attention"), None),
    "lfm2": (CARRIES_STATE.format("conv"), None),
    "recurrent_gemma": ("carry state along the row", None),
    "rwkv": ("carry state along the row", None),
    "bloom": (OF_ITS_OWN, None),
    "falcon": (r"attention of its own.*trainer\.packing = \"buckets\"", None),
}


def tiny(kind, implementation=None):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.split()[0], **{**SMALL, **SPECIAL_TOKENS, **OPTIONS.get(kind, {})})
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation)


def outcome(folder, packing):
    try:
        load_policy(folder, temperature=1.0, precision="float32", packing=packing)
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_accepted_or_refused_for_its_reason(kind, tmp_path):
    tiny(kind).save_pretrained(tmp_path)
    for packing, wanted in zip(("packed", "buckets"), MODELS[kind], strict=True):
        found = outcome(tmp_path, packing)
        if wanted is None:
            assert found is None, packing
        else:
            assert found is not None, packing
            assert re.search(wanted, found), (packing, found)


# --- experts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_experts_hide_no_leak(kind):
    """One of the size of rounding, for which moved logits would be too coarse."""
    model = tiny(kind, VARLEN)
    assert_isolated(model)
    model.model.norm.register_forward_hook(lambda module, arguments, hidden: hidden + 1e-9 * hidden.cumsum(1))
    with pytest.raises(ModelError, match=r"have a gradient of .* by tokens of another, expected exactly 0"):
        assert_isolated(model)


# --- padded rows -------------------------------------------------------------------------------------------------


def test_rows_of_a_model_that_looks_ahead_are_refused():
    model = tiny("llama", "sdpa")
    model.model.norm.register_forward_hook(lambda module, arguments, hidden: hidden + 1e-3 * hidden.flip(1).cumsum(1))
    with pytest.raises(ModelError, match=r"moved logits of another .* it looks ahead or mixes rows"):
        assert_rows_isolated(model)


def test_rows_of_a_model_that_mixes_them_are_refused():
    model = tiny("llama", "sdpa")
    model.model.norm.register_forward_hook(
        lambda module, arguments, hidden: hidden + 1e-3 * hidden.mean(0, keepdim=True).roll(1, 1).cumsum(1)
    )
    with pytest.raises(ModelError, match="cannot be trained on rows padded on the right"):
        assert_rows_isolated(model)


def gradient(model, batches):
    policy = Policy(model, 1.0)
    policy.zero_grad()
    for batch in batches:
        policy(batch)[0].square().sum().backward()
    return torch.cat([each.grad.flatten() for each in policy.parameters() if each.grad is not None])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss", "mamba", "falcon_h1", "qwen3_next", "lfm2"])
def test_the_gradient_of_padded_rows_is_that_of_each_sequence_alone(kind):
    rng = np.random.default_rng(0)
    sequences = [
        TokenSequence(token_ids=rng.integers(3, 300, length), num_prompt_tokens=3) for length in (20, 20, 19, 18)
    ]
    model = tiny(kind)
    together = gradient(model, [pad_rows(sequences)])
    alone = gradient(model, [pad_rows([sequence]) for sequence in sequences])
    assert (together - alone).norm() <= 1e-5 * alone.norm()


def test_a_model_keeps_its_mode():
    model = tiny("mamba").train()
    assert_rows_isolated(model)
    assert model.training


# --- a cap on attention scores -----------------------------------------------------------------------------------


def test_sdpa_leaves_out_the_cap_and_is_refused(tmp_path):
    capped, left_out = (tiny("gemma2", name).eval() for name in ("eager", "sdpa"))
    for model in (capped, left_out):
        model.load_state_dict({name: 10 * tensor for name, tensor in capped.state_dict().items()})
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = 0.5
    ids = torch.arange(20)[None]
    assert (capped(ids, use_cache=False).logits - left_out(ids, use_cache=False).logits).abs().max() > 1e-3
    for check in (assert_isolated, assert_rows_isolated):
        with pytest.raises(ModelError, match="which sdpa leaves out"):
            check(left_out)
    assert_rows_isolated(capped)


# --- the cache ---------------------------------------------------------------------------------------------------


def leak(model, arguments, changed):
    """How far logits after the first 5 tokens move when one of those is changed."""
    before = model(**arguments).logits.flatten(0, 1)[5:]
    after = model(**{**arguments, "input_ids": changed}).logits.flatten(0, 1)[5:]
    return (before - after).abs().max().item()


@torch.no_grad()
def test_the_default_cache_of_transformers_leaks_and_is_never_made(monkeypatch):
    """With a cache transformers builds no packed mask; `use_cache` is true unless it is said otherwise."""
    model = tiny("llama", "sdpa").eval()
    sequences = [TokenSequence(token_ids=np.arange(3, 8) + row, num_prompt_tokens=2) for row in range(2)]
    arguments = batch_arguments(pack(sequences), torch.device("cpu"))
    changed = arguments["input_ids"].clone()
    changed[0, 0] += 1
    assert leak(model, arguments, changed) == 0.0
    assert leak(model, {name: value for name, value in arguments.items() if name != "use_cache"}, changed) > 1e-3

    def refuse(*arguments, **options):
        raise AssertionError("a cache was made")

    monkeypatch.setattr(DynamicCache, "__init__", refuse)
    with pytest.raises(AssertionError, match="a cache was made"):
        model(input_ids=changed)
    for implementation, batches in {
        "sdpa": [pack(sequences), pad_rows(sequences), pack([])],
        VARLEN: [pack(sequences), pack_pieces([sequences[:1] * 2])],
    }.items():
        for mode in (True, False):
            policy = Policy(tiny("llama", implementation), 1.0).train(mode)
            for batch in batches:
                policy(batch)
