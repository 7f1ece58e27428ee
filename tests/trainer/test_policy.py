"""A policy end to end: of a model that changes its logits, packed, in one pass and in two."""

import numpy as np
import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from tiny_models import small_llama
from towline.trainer.attention import batch_arguments
from towline.trainer.fused_loss import differentiated
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.policy import Policy, load_policy


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("granite")
    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, logits_scaling=0.25, initializer_range=0.1,
    )  # fmt: skip
    GraniteForCausalLM(config).save_pretrained(folder)
    return load_policy(folder, temperature=0.7, precision="float32")


def two_sequences():
    rng = np.random.default_rng(0)
    return [TokenSequence(token_ids=rng.integers(0, 50, length), num_prompt_tokens=3) for length in (9, 5)]


def own_logprobs(policy, sequence):
    ids = torch.from_numpy(sequence.token_ids).long()
    logits_TV = policy.model(input_ids=ids[None], use_cache=False, cu_seq_lens_q=torch.tensor([0, len(ids)])).logits[0]
    logprobs_TV = torch.log_softmax(logits_TV / 0.7, -1)
    return logprobs_TV[sequence.num_prompt_tokens - 1 : -1].gather(-1, ids[sequence.num_prompt_tokens :, None])[:, 0]


def test_logprobs_are_those_of_the_models_own_scaled_logits(policy):
    sequences = two_sequences()
    wanted_N = torch.cat([own_logprobs(policy, sequence) for sequence in sequences])
    logprobs_N, entropy_N = policy(pack(sequences))
    torch.testing.assert_close(logprobs_N, wanted_N, rtol=0, atol=1e-5)
    assert entropy_N.shape == (0,)


def test_a_token_loss_gives_its_sum_and_the_gradients_of_two_passes(policy):
    batch = pack(two_sequences())
    weights_N = torch.randn(len(batch.target_ids), generator=torch.Generator().manual_seed(0))
    logprobs_N, entropy_N = policy(batch, with_entropy=True)
    wanted = (weights_N * logprobs_N.exp()).sum()
    found, *measured = policy(
        batch, with_entropy=True, token_loss=differentiated(lambda logprobs, tokens: weights_N[tokens] * logprobs.exp())
    )
    torch.testing.assert_close([found, *measured], [wanted, logprobs_N.detach(), entropy_N])
    parameters = list(policy.parameters())
    torch.testing.assert_close(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters))


def test_smoothed_labels_are_those_of_torch_on_the_models_own_logits():
    model = small_llama(initializer_range=0.2)
    token_ids = np.random.default_rng(0).integers(0, 300, 12)
    batch = pack([TokenSequence(token_ids=token_ids, num_prompt_tokens=3)])
    loss = differentiated(lambda logprobs_C, tokens: -logprobs_C)
    found, logprobs_N, _ = Policy(model, 1.0)(batch, token_loss=loss, label_smoothing=0.1)
    logits_NV = model(**batch_arguments(batch, torch.device("cpu"))).logits[0, batch.logit_index]
    targets_N = torch.from_numpy(batch.target_ids)
    wanted = torch.nn.functional.cross_entropy(logits_NV, targets_N, label_smoothing=0.1, reduction="sum")
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        -logprobs_N.sum(), torch.nn.functional.cross_entropy(logits_NV, targets_N, reduction="sum").detach()
    )
    with pytest.raises(AssertionError, match="label_smoothing is of a token_loss"):
        Policy(model, 1.0)(batch, label_smoothing=0.1)
