"""The policy's forward on a GPU: packed sequences stay apart, and log-probs are those of plain float64 on the CPU."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.import_utils import is_flash_attn_2_available

from towline.trainer.attention import NAME
from towline.trainer.logprobs import token_logprobs_and_entropy
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.policy import load_policy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TEMPERATURE = 0.7
LENGTHS = [(3, 90), (70, 2), (40, 80), (2, 170), (5, 1), (3, 90)]
"""Prompt and completion tokens."""
BOUND = {"float32": 2e-4, "bfloat16": 0.25}
"""Largest difference of a log-prob. bfloat16 rounds logits of about 5 to 1/64, and every layer before them."""


@pytest.fixture(scope="module")
def sequences():
    rng = np.random.default_rng(0)
    return [
        TokenSequence(token_ids=rng.integers(3, 1600, prompt + completion), num_prompt_tokens=prompt)
        for prompt, completion in LENGTHS
    ]


def plain_logprobs(folder, sequences):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    found = []
    for sequence in sequences:
        ids = torch.from_numpy(sequence.token_ids)
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(model(ids[None], use_cache=False).logits[0] / TEMPERATURE, -1)
        found.append(logprobs_TV[:-1].gather(-1, ids[1:, None])[sequence.num_prompt_tokens - 1 :, 0])
    return torch.cat(found)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", [NAME, "flash_attention_2"])
def test_logprobs_are_those_of_float64_on_the_cpu(model_folder, sequences, attention, precision):
    if attention == "flash_attention_2" and (precision == "float32" or not is_flash_attn_2_available()):
        pytest.skip("flash_attention_2 is not installed, or cannot do float32")
    # Loading proves that the packed sequences are isolated.
    policy = load_policy(model_folder, temperature=TEMPERATURE, precision=precision, attention=attention)
    assert next(policy.parameters()).device.type == "cuda"
    assert policy.model.config._attn_implementation == attention
    with torch.no_grad():
        found = policy(pack(sequences))[0]
    assert found.dtype == torch.float32
    error = (found.cpu().double() - plain_logprobs(model_folder, sequences)).abs()
    assert error.max() < BOUND[precision]
    assert error.mean() < BOUND[precision] / 5


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradients_of_packed_and_lone_sequences_are_equal(model_folder, sequences, precision):
    policy = load_policy(model_folder, temperature=TEMPERATURE, precision=precision)

    def gradients(batches):
        policy.zero_grad()
        for batch in batches:
            policy(batch)[0].sum().backward()
        return [parameter.grad.float().clone() for parameter in policy.parameters()]

    packed, lone = gradients([pack(sequences)]), gradients([pack([sequence]) for sequence in sequences])
    bound = {"float32": 1e-4, "bfloat16": 5e-2}[precision]
    for found, wanted in zip(packed, lone, strict=True):
        assert (found - wanted).norm() < bound * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs_on_a_vocabulary_of_usual_size(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(1000, 256, generator=generator).to("cuda", dtype)
    head_VD = (torch.randn(50_000, 256, generator=generator) / 8).to("cuda", dtype)
    targets_T = torch.randint(0, 50_000, (1000,), generator=generator).to("cuda")
    found_T, entropy_T = token_logprobs_and_entropy(hidden_TD, head_VD, targets_T, temperature=TEMPERATURE)
    exact_TV = torch.log_softmax(hidden_TD.double() @ head_VD.double().T / TEMPERATURE, -1)
    exact_T = exact_TV.gather(-1, targets_T[:, None])[:, 0]
    exact_entropy_T = -(exact_TV.exp() * exact_TV).sum(-1)
    # The inputs are what they are: only the matrix product and what follows it is rounded. Logits reach about 13.
    bound = {torch.float32: 1e-3, torch.bfloat16: 0.1}[dtype]
    assert (found_T - exact_T).abs().max() < bound
    assert (entropy_T - exact_entropy_T).abs().max() < bound
