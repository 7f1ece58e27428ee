"""A round of iterated DPO through the engine, beside DPO on the pairs that its rewards make, and beside the formulas.

The engine has one rank and does not shard; tiny Llama, float32.
"""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from scored_groups import NAN, completion, scored_group
from single_rank import single_rank
from towline.storage.errors import RewardError
from towline.trainer.dpo import Dpo
from towline.trainer.iterated_dpo import take_inner_steps
from towline.trainer.policy import load_policy
from towline.trainer.preference_config import IteratedDpoConfig
from towline.trainer.preference_pairs import ranked_pairs
from towline.trainer.supervised_config import DpoConfig

VOCABULARY, TEMPERATURE, RATE, BETA = 97, 0.7, 1e-2, 0.3
REWARDS = [(0.0, 1.0, 0.5), (1.0, 1.0, 1.0), (NAN, 0.2, 0.1), (1.0, 0.0, 0.0)]
NUM_PAIRS = 3
"""Of the rewards: the second group has none."""

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _first_gpu_if_any(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")


@pytest.fixture
def folder(tmp_path):
    return save_model(tmp_path / "policy", seed=0)


def save_model(folder, *, seed):
    torch.manual_seed(seed)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=512, initializer_range=0.1, pad_token_id=0, eos_token_id=1,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


def engine(folder, config):
    from towline.trainer.deepspeed_engine import DeepSpeedEngine

    return DeepSpeedEngine(load_policy(folder, temperature=1.0, precision="float32"), config)


def trained(**changes):
    """Tokens in a micro-batch: one pair, so that a step accumulates."""
    settings = {
        "learning_rate": RATE, "beta": BETA, "precision": "float32", "zero_stage": 0, "max_tokens_per_microbatch": 24,
    }  # fmt: skip
    return IteratedDpoConfig(**(settings | changes))


def sampled_groups(folder, *, off=0.0):
    """Groups whose log-probs are the policy's at the sampling temperature, but for the last of all, which is off."""
    rng = np.random.default_rng(0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    groups = []
    for rewards in REWARDS:
        prompt = rng.integers(2, VOCABULARY, 4)
        completions = []
        for length in rng.integers(2, 9, len(rewards)):
            token_ids = rng.integers(2, VOCABULARY, length)
            with torch.no_grad():
                logits = model(torch.from_numpy(np.concatenate([prompt, token_ids]))[None]).logits[0]
            logprobs = (logits / TEMPERATURE).log_softmax(-1)[len(prompt) - 1 : -1]
            completions.append(completion(token_ids, logprobs[range(length), token_ids].numpy()))
        groups.append(scored_group(prompt, completions, rewards))
    groups[-1].group.completions[0].logprobs[-1] += off
    return groups


def inner_steps(trainer, config, groups, *, reference=None, step=0):
    with single_rank():
        return take_inner_steps(
            trainer, reference, config, groups, step=step, seed=3, sampling_temperature=TEMPERATURE,
            on_progress=lambda phase: None,
        )  # fmt: skip


def weights(trainer):
    return {name: weight.detach().clone() for name, weight in trainer.policy.named_parameters()}


def policy_sums(folder, pairs):
    """Log-probs of chosen and rejected at temperature 1, from transformers' own logits."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    sums = []
    for pair in pairs:
        for sequence in (pair.tokens.chosen, pair.tokens.rejected):
            token_ids = torch.from_numpy(sequence.token_ids).long()
            with torch.no_grad():
                logprobs = model(token_ids[None]).logits[0].log_softmax(-1)
            first = sequence.num_prompt_tokens
            sums.append(logprobs[range(first - 1, len(token_ids) - 1), token_ids[first:]].double().sum().item())
    return np.array(sums).reshape(-1, 2)


def test_the_first_step_of_a_round_is_that_of_dpo_on_its_pairs_with_the_policy_as_reference(folder):
    groups, config = sampled_groups(folder), trained()
    with single_rank():
        mine, other = engine(folder, config), None
        metrics = inner_steps(mine, config, groups)
        pairs = ranked_pairs(groups, 1)
        given = DpoConfig(batch_size=NUM_PAIRS, schedule="constant", **config.model_dump(include=shared_fields()))
        other = engine(folder, given)
        dpo = Dpo(
            engine=other, config=given, pairs=[pair.tokens for pair in pairs], reference=policy_sums(folder, pairs),
            rows=lambda step: range(NUM_PAIRS), total_steps=1, on_progress=lambda phase: None,
        )  # fmt: skip
        expected = dpo.take_step(0)
    assert metrics["loss/preference"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["preference/margin"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["loss/gradient_norm"] == pytest.approx(expected["loss/gradient_norm"], rel=1e-4)
    for name, weight in weights(mine).items():
        torch.testing.assert_close(weight, dict(weights(other))[name], atol=2e-4, rtol=0)


def shared_fields():
    return DpoConfig.model_fields.keys() & IteratedDpoConfig.model_fields.keys()


def test_a_round_says_what_it_learned_from(folder):
    config = trained(inner_epochs=2, minibatches=2)
    with single_rank():
        trainer = engine(folder, config)
        before = weights(trainer)
        metrics = inner_steps(trainer, config, sampled_groups(folder, off=0.25))
    assert metrics["preference/pairs"] == NUM_PAIRS
    assert metrics["preference/reward_gap"] == pytest.approx((1.0 + 0.1 + 1.0) / 3)
    assert metrics["preference/margin"] > 0
    assert metrics["weights/moved"] > 0
    assert any(not torch.equal(weight, before[name]) for name, weight in weights(trainer).items())
    # The engine's log-probs are those of the sampling temperature; one was altered.
    assert metrics["mismatch/max_abs_logprob"] == pytest.approx(0.25, abs=1e-4)
    num_tokens = sum(len(each) for pair in ranked_pairs(sampled_groups(folder), 1) for each in pair.rollout_logprobs)
    assert metrics["mismatch/k3"] * num_tokens == pytest.approx(math.exp(-0.25) - 1 + 0.25, abs=1e-4)


def test_tokens_of_an_older_version_do_not_speak_of_the_engine(folder):
    config = trained()
    with single_rank():
        metrics = inner_steps(engine(folder, config), config, sampled_groups(folder, off=0.25), step=1)
    assert math.isnan(metrics["mismatch/k3"])
    assert metrics["staleness/max"] == 1


def test_the_model_that_the_run_began_with_is_the_reference_where_it_is_asked_for(folder, tmp_path):
    from towline.trainer.reference import Reference

    start = save_model(tmp_path / "start", seed=1)
    groups, config = sampled_groups(folder), trained(reference="start")
    with single_rank():
        reference = Reference(start, config, temperature=1.0)
        metrics = inner_steps(engine(folder, config), config, groups, reference=reference)
    pairs = ranked_pairs(groups, 1)
    ratios_P2 = policy_sums(folder, pairs) - policy_sums(start, pairs)
    margins = BETA * (ratios_P2[:, 0] - ratios_P2[:, 1])
    assert metrics["preference/margin"] == pytest.approx(margins.mean(), abs=1e-4)
    assert metrics["loss/preference"] == pytest.approx(np.log1p(np.exp(-margins)).mean(), abs=1e-5)


def test_equal_rewards_change_nothing_and_groups_without_scores_are_an_error(folder):
    config, groups = trained(), sampled_groups(folder)
    with single_rank():
        trainer = engine(folder, config)
        before = weights(trainer)
        metrics = inner_steps(trainer, config, [groups[1]])
        assert (metrics["preference/pairs"], metrics["tokens/trained"], metrics["weights/moved"]) == (0, 0, 0)
        unscored = scored_group([5, 6], groups[0].group.completions, [NAN, NAN, 1.0])
        with pytest.raises(RewardError, match=r"step 4: no prompt has two scored completions"):
            inner_steps(trainer, config, [unscored], step=4)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trainer).items())


def test_the_likelihood_of_chosen_completions_is_added_with_its_weight(folder):
    groups, config = sampled_groups(folder), trained(nll_weight=0.5)
    with single_rank():
        metrics = inner_steps(engine(folder, config), config, groups)
    pairs = ranked_pairs(groups, 1)
    lengths = np.array([len(pair.rollout_logprobs[0]) for pair in pairs])
    expected = math.log(2) - 0.5 * (policy_sums(folder, pairs)[:, 0] / lengths).mean()
    assert metrics["loss/preference"] == pytest.approx(expected, abs=1e-5)
