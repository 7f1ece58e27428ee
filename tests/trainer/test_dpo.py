"""A step of DPO through the engine: the loss, its gradient and what is measured, beside the formulas.

The engine has one rank and does not shard; tiny Llama, float32.
"""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from single_rank import single_rank
from towline.trainer.dpo import Dpo
from towline.trainer.packing import TokenSequence
from towline.trainer.packing_pairs import lay_out_pairs
from towline.trainer.pair_step import of_pairs
from towline.trainer.policy import load_policy
from towline.trainer.preference_losses import completion_logprobs
from towline.trainer.supervised_config import DpoConfig
from towline.trainer.token_examples import TokenPair

SIZES = [(3, 9, 4), (5, 2, 7), (2, 300, 400), (4, 1, 1)]
"""Tokens of prompt, chosen and rejected completion; the third pair is longer than a chunk of the head."""
VOCABULARY, BETA = 97, 0.3


def test_a_loss_of_pairs_is_asked_for_those_whose_tokens_a_stretch_holds():
    asked = []

    def pair_loss(members, logprobs_N):
        asked.append((list(members), logprobs_N.tolist()))
        return logprobs_N.sum()

    loss = of_pairs(pair_loss, [7, 3, 5], [2, 1, 3])
    logprobs_T = torch.arange(6.0)
    assert loss(logprobs_T[0:3], slice(0, 3)).item() == 3
    assert loss(logprobs_T[3:6], slice(3, 6)).item() == 12
    assert asked == [([7, 3], [0, 1, 2]), ([5], [3, 4, 5])]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.1, pad_token_id=0, eos_token_id=1,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    return tmp_path


def pairs():
    rng = np.random.default_rng(0)
    made = []
    for num_prompt_tokens, *lengths in SIZES:
        prompt = rng.integers(2, VOCABULARY, num_prompt_tokens)
        chosen, rejected = (
            TokenSequence(
                token_ids=np.concatenate([prompt, rng.integers(2, VOCABULARY, length)]),
                num_prompt_tokens=num_prompt_tokens,
            )
            for length in lengths
        )
        made.append(TokenPair(row=0, margin=None, chosen=chosen, rejected=rejected))
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_step_has_the_loss_the_gradient_and_the_rewards_of_the_formula(folder, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    reference = np.random.default_rng(1).normal(size=(len(SIZES), 2)) - [[sum(lengths)] for _, *lengths in SIZES]

    plain = load_policy(folder, temperature=1.0, precision="float32")
    batch = lay_out_pairs(pairs(), is_padded=False, shares_prompts=True)
    policy_P2 = completion_logprobs(plain(batch)[0], batch.num_completion_tokens).view(-1, 2)
    ratios_P2 = policy_P2 - torch.from_numpy(reference)
    losses_P = -torch.nn.functional.logsigmoid(BETA * (ratios_P2[:, 0] - ratios_P2[:, 1]))
    losses_P.mean().backward()
    norm = torch.stack([weight.grad.norm() for weight in plain.parameters()]).norm()

    # One group for both: DeepSpeed holds on to its first.
    with single_rank():
        for max_tokens in (32, 4096):
            metrics = one_step(folder, reference, max_tokens)
            assert metrics["loss/preference"] == pytest.approx(losses_P.mean().item(), rel=1e-5)
            assert metrics["loss/gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
            assert metrics["preference/chosen_reward"] == pytest.approx(BETA * ratios_P2[:, 0].mean().item(), rel=1e-5)
            assert metrics["preference/rejected_reward"] == pytest.approx(
                BETA * ratios_P2[:, 1].mean().item(), rel=1e-5
            )
            assert metrics["preference/accuracy"] == (ratios_P2[:, 0] > ratios_P2[:, 1]).double().mean().item()
            assert metrics["preference/chosen_logprob"] == pytest.approx(policy_P2[:, 0].mean().item(), rel=1e-5)


def one_step(folder, reference, max_tokens):
    from towline.trainer.deepspeed_engine import DeepSpeedEngine

    config = DpoConfig(
        batch_size=len(SIZES), learning_rate=1e-3, schedule="constant", beta=BETA, precision="float32", zero_stage=0,
        max_tokens_per_microbatch=max_tokens,
    )  # fmt: skip
    dpo = Dpo(
        engine=DeepSpeedEngine(load_policy(folder, temperature=1.0, precision="float32"), config),
        config=config,
        pairs=pairs(),
        reference=reference,
        rows=lambda step: range(len(SIZES)),
        total_steps=1,
        on_progress=lambda phase: None,
    )
    return dpo.take_step(0)
