"""What models do to their logits, against transformers' own logits; and the check that refuses the rest."""

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    FalconH1Config,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    HyperCLOVAXConfig,
    HyperCLOVAXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    RecurrentGemmaConfig,
)

from towline.storage.errors import ModelError
from towline.trainer.attention import packed_arguments
from towline.trainer.head import HeadTransform, head_transform
from towline.trainer.head_check import check_head
from towline.trainer.logprobs import token_logprobs

SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 2,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}, (1.0, None)),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 0.25}, (4.0, None)),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 3.0}, (3.0, None)),
    "cohere2": (Cohere2ForCausalLM, Cohere2Config, {"logit_scale": 3.0}, (3.0, None)),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 0.8, "head_dim": 16}, (1.0, 0.8)),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"final_logit_softcapping": 0.8, "head_dim": 16}, (1.0, 0.8)),
    "hyperclovax": (HyperCLOVAXForCausalLM, HyperCLOVAXConfig, {"logits_scaling": 4.0}, (4.0, None)),
    "minicpm3": (MiniCPM3ForCausalLM, MiniCPM3Config, {"dim_model_base": 128, **LATENT}, (4.0, None)),
}
TOKENS = torch.arange(1, 40) * 7 % 50


def tiny_model(family, *, tied=False, biased=False, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    model_class, config_class, transform, _ = FAMILIES[family]
    options = {"initializer_range": 0.1, **SMALL, **transform, **settings}
    model = model_class(config_class(**options, tie_word_embeddings=tied))
    if biased:
        model.lm_head = torch.nn.Linear(32, 50)
    return model.to(dtype).eval()


def own_logprobs(model):
    """Through the model's own forward: the hidden states at the head [T - 1, D], log-probs at temperature 0.7."""
    seen = []
    hook = model.get_decoder().register_forward_hook(lambda module, arguments, output: seen.append(output[0]))
    logits_TV = model(**packed_arguments([TOKENS])).logits[0, :-1] / 0.7
    hook.remove()
    return seen[0], torch.log_softmax(logits_TV, -1).gather(-1, TOKENS[1:, None])[:, 0]


def ours(model, hidden_TD):
    head = model.get_output_embeddings()
    options = {"temperature": 0.7, "chunk_tokens": 16, "head_bias_V": head.bias}
    return token_logprobs(hidden_TD, head.weight, TOKENS[1:], transform=head_transform(model.config), **options)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("family", "variant"),
    [(family, variant) for family in FAMILIES for variant in ("untied", "tied")]
    + [(family, "biased") for family in ("llama", "granite", "cohere", "gemma2")],
)
def test_logprobs_and_gradients_are_those_of_the_models_own_logits(family, variant, dtype, tolerance):
    model = tiny_model(family, tied=variant == "tied", biased=variant == "biased", dtype=dtype)
    upstream_T = torch.randn(len(TOKENS) - 1, dtype=dtype, generator=torch.Generator().manual_seed(1))
    own_BTD, own_T = own_logprobs(model)
    parameters = [own_BTD, *model.parameters()]
    wanted = torch.autograd.grad(own_T, parameters, upstream_T)

    seen_BTD = model.get_decoder()(**packed_arguments([TOKENS])).last_hidden_state
    found_T = ours(model, seen_BTD[0, :-1])
    found = torch.autograd.grad(found_T, [seen_BTD, *model.parameters()], upstream_T)
    assert found_T.dtype == dtype
    torch.testing.assert_close(found_T, own_T, rtol=0, atol=tolerance)
    assert own_T.std() > 0.1
    for found_gradient, wanted_gradient in zip(found, wanted, strict=True):
        largest = wanted_gradient.abs().max().item()
        torch.testing.assert_close(found_gradient, wanted_gradient, rtol=0, atol=tolerance * max(1.0, largest))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_transform_is_read_off_the_configuration(family):
    multiplier, softcap = FAMILIES[family][-1]
    assert head_transform(tiny_model(family).config) == HeadTransform(multiplier=multiplier, softcap=softcap)


@pytest.mark.parametrize(
    ("config", "transform"),
    [
        (FalconH1Config(lm_head_multiplier=0.04), HeadTransform(multiplier=0.04)),
        (RecurrentGemmaConfig(logits_soft_cap=25.0), HeadTransform(softcap=25.0)),
        (Gemma2Config(final_logit_softcapping=None), HeadTransform()),
        (MiniCPM3Config(dim_model_base=None), HeadTransform()),
    ],
)
def test_other_names_of_transforms(config, transform):
    assert head_transform(config) == transform


def test_the_multiplier_comes_before_the_cap():
    # 2 tanh(3 x 1 / 2) against 0: the probability of the first is 1 / (1 + exp(-1.8102966))
    transform = HeadTransform(multiplier=3.0, softcap=2.0)
    logprobs_T = token_logprobs(torch.ones(1, 1), torch.tensor([[1.0], [0.0]]), torch.tensor([0]), transform=transform)
    assert logprobs_T.item() == pytest.approx(-0.1515235, rel=1e-5)


@pytest.mark.parametrize("transform", [HeadTransform(multiplier=-1.7), HeadTransform(multiplier=1.7, softcap=1.5)])
def test_gradcheck_of_a_transform(transform):
    generator = torch.Generator().manual_seed(0)
    sizes = ((5, 3), (7, 3), (7,))
    leaves = [torch.randn(*size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]
    targets_T = torch.tensor([3, 0, 6, 6, 1])
    options = {"temperature": 0.8, "chunk_tokens": 2, "transform": transform}

    def logprobs(hidden_TD, weight_VD, bias_V):
        return token_logprobs(hidden_TD, weight_VD, targets_T, head_bias_V=bias_V, **options)

    assert torch.autograd.gradcheck(logprobs, leaves)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("dtype", "largest"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_known_heads_pass_the_check(family, dtype, largest):
    assert check_head(tiny_model(family, dtype=dtype), TOKENS) <= largest


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda module, arguments, logits: logits.relu())
    expected = r"\(llama\) differ by up to \d.*multiplier 1 and soft-cap None, .*\(supported are logit_scale, "
    with pytest.raises(ModelError, match=expected):
        check_head(model, TOKENS)


def test_a_model_that_ignores_its_configuration_is_refused():
    model = tiny_model("llama")
    model.config.logit_scale = 2.0
    with pytest.raises(ModelError, match="multiplier 2 and soft-cap None"):
        check_head(model, TOKENS)


def test_dropout_does_not_disturb_the_check():
    model = tiny_model("llama", attention_dropout=0.5, dtype=torch.float32).train()
    assert check_head(model, TOKENS) <= 1e-5
    assert model.training


def test_a_model_whose_logits_are_nan_is_refused():
    model = tiny_model("llama")
    torch.nn.init.constant_(model.model.norm.weight, float("nan"))
    with pytest.raises(ModelError, match="nan"):
        check_head(model, TOKENS)
