"""Each check is a rounding in sound machinery, and far from it where a fault is planted.

On one rank without DeepSpeed; that nothing is left behind, on any rank and stage, shows test_deepspeed_engine.py.
"""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from single_rank import single_rank
from towline.trainer.attention import register_varlen_attention
from towline.trainer.config import TrainerConfig
from towline.trainer.fixed_logprobs import FixedLogprobs
from towline.trainer.kl import kl_k3
from towline.trainer.micro_batch_loss import MicroBatchLoss, micro_batch_loss
from towline.trainer.normaliser import loss_totals
from towline.trainer.packing import TokenSequence
from towline.trainer.packing_rows import lay_out
from towline.trainer.policy import Policy
from towline.trainer.rollout_batch import TrainingSequence
from towline.trainer.self_checks import gradient_checks, kl_reward_effect, split_check

CONFIG = TrainerConfig(learning_rate=1e-6, kl_beta=0.1, precision="float32")


@pytest.fixture(scope="module", autouse=True)
def trainer_group():
    with single_rank():
        yield


# --- gradients ---------------------------------------------------------------------------------------------------


def token(policy, old, reference, advantage, *, make=MicroBatchLoss, **settings):
    """The loss of one token of weight 1, and its log-prob."""
    fixed = FixedLogprobs(
        rollout_N=torch.tensor([old]), old_N=torch.tensor([old]), reference_N=torch.tensor([reference])
    )
    loss = make(
        config=CONFIG.model_copy(update=settings),
        fixed=fixed,
        advantages_N=torch.tensor([advantage]),
        weights_N=torch.ones(1),
        lengths=(1,),
    )
    return loss, torch.tensor([policy])


@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_kls_part_of_the_gradient_is_what_one_computes_by_hand(ratio):
    # k3's slope is 1 - exp(reference - policy) = 1/2, times 0.1; the surrogate's at a ratio of 1 is -2.
    found = gradient_checks(*token(-1.0, -1.0, -1.0 - math.log(2), 2.0, ratio=ratio))
    assert found["check/kl_effect"] == pytest.approx(0.05 / 1.95, rel=1e-6)
    assert found["check/fixed_gradient"] == found["check/fixed_graphs"] == 0.0


def test_a_small_kl_is_not_lost_beside_the_rewards():
    assert gradient_checks(*token(-1.0, -1.0, -1.0 - 1e-6, 2.0))["check/kl_effect"] == pytest.approx(5e-8, rel=0.1)


def test_a_policy_at_its_reference_is_not_judged():
    assert math.isnan(gradient_checks(*token(-1.0, -1.0, -1.0, 2.0))["check/kl_effect"])


@pytest.mark.parametrize("settings", [{"kl_beta": 0.0}, {"kl_place": "reward"}])
def test_without_a_kl_in_the_loss_there_is_nothing_to_say_of_it(settings):
    assert "check/kl_effect" not in gradient_checks(*token(-1.0, -1.0, -2.0, 2.0, **settings))


class KLOfAConstant(MicroBatchLoss):
    """Its KL is measured and added, on log-probs without a gradient."""

    def __call__(self, logprobs_C, tokens):
        config = self.config.model_copy(update={"kl_beta": 0.0})
        of_rewards = MicroBatchLoss(
            config=config, fixed=self.fixed, advantages_N=self.advantages_N, weights_N=self.weights_N,
            lengths=self.lengths,
        )  # fmt: skip
        loss = of_rewards(logprobs_C, tokens)
        self.sums.update(of_rewards.sums)
        return loss + self.config.kl_beta * kl_k3(logprobs_C.detach(), self.fixed.reference_N[tokens]).sum()


def test_a_kl_without_a_gradient_has_no_effect():
    found = gradient_checks(*token(-1.0, -1.0, -1.5, 2.0, make=KLOfAConstant))
    assert found["check/kl_effect"] == 0.0


class OldWithGradient(MicroBatchLoss):
    """The old log-probs were not detached."""

    def __call__(self, logprobs_C, tokens):
        ratio_C = torch.exp(logprobs_C - self.fixed.old_N[tokens])
        return -(ratio_C * self.advantages_N[tokens].detach() * self.weights_N[tokens].detach()).sum()


def test_a_gradient_into_the_old_log_probs_is_found():
    # d/d old of -exp(policy - old) A is the ratio times A.
    found = gradient_checks(*token(-1.0, -1.0 - math.log(3), -1.0, 2.0, make=OldWithGradient))
    assert found["check/fixed_gradient"] == pytest.approx(6.0)
    assert found["check/fixed_graphs"] == 0.0


def test_log_probs_that_could_carry_a_gradient_on_are_found():
    loss, logprobs_N = token(-1.0, -1.0, -1.5, 2.0)
    carrying = dataclasses.replace(loss.fixed, reference_N=loss.fixed.reference_N.requires_grad_())
    found = gradient_checks(dataclasses.replace(loss, fixed=carrying), logprobs_N)
    assert found["check/fixed_graphs"] == 1.0
    assert found["check/fixed_gradient"] == 0.0


def test_the_checks_leave_what_is_measured_alone():
    loss, logprobs_N = token(-1.0, -1.0, -1.5, 2.0)
    loss(logprobs_N, slice(None))
    before = {name: value.clone() for name, value in loss.sums.items()}
    gradient_checks(loss, logprobs_N)
    assert loss.sums == before


# --- a KL in the reward ------------------------------------------------------------------------------------------


def sequence(group, member, advantage=0.0, token_ids=(1, 2), num_prompt_tokens=1):
    num_tokens = len(token_ids) - num_prompt_tokens
    return TrainingSequence(
        tokens=TokenSequence(token_ids=np.array(token_ids), num_prompt_tokens=num_prompt_tokens),
        rollout_logprobs=np.full(num_tokens, -1.0, np.float32),
        versions=np.zeros(num_tokens, np.uint32),
        advantage=advantage,
        group=group,
        member=member,
    )


PAIR = [sequence(0, 0, 1.0), sequence(0, 1, -1.0)]


def test_penalties_change_the_advantages():
    now = {(0, 0): 3.0, (0, 1): -4.0}
    found = kl_reward_effect(PAIR, now, {(0, 0): 0.1, (0, 1): 0.3})
    assert found["check/kl_effect"] == pytest.approx(math.hypot(2, 3) / 5)


def test_penalties_that_changed_nothing_are_told():
    before = {(0, 0): 1.0, (0, 1): -1.0}
    assert kl_reward_effect(PAIR, before, {(0, 0): 0.1, (0, 1): 0.3})["check/kl_effect"] == 0.0


def test_equal_penalties_of_a_group_change_nothing_rightly():
    before = {(0, 0): 1.0, (0, 1): -1.0}
    assert math.isnan(kl_reward_effect(PAIR, before, {(0, 0): 0.2, (0, 1): 0.2})["check/kl_effect"])


# --- split -------------------------------------------------------------------------------------------------------

PIECES = [(6, [9, 4, 12]), (3, [7, 15])]
"""Tokens of the prompt, and of its completions."""


class PlainEngine:
    """A policy by itself, and what is wrong with it."""

    def __init__(self, fault=None, dtype=torch.float32, *, is_padded=False):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.06,
            attn_implementation="sdpa" if is_padded else register_varlen_attention(),
        )  # fmt: skip
        self.policy = Policy(LlamaForCausalLM(config).to(dtype).eval(), 0.7)
        self.fault = fault

    @torch.no_grad()
    def evaluate(self, batch):
        num_tokens = len(batch.token_ids)
        if self.fault == "leak":
            whole = {"cu_seq_lens": np.array([0, num_tokens], np.int32), "prefixes": np.zeros((1, 2), np.int32)}
            batch = dataclasses.replace(batch, max_length=num_tokens, **whole)
        elif self.fault == "positions":
            batch = dataclasses.replace(batch, position_ids=np.arange(num_tokens))
        elif self.fault == "batch-dependent":
            # As a layer that normalises over the micro-batch.
            return self.policy(batch)[0] * (1 + 0.001 * num_tokens)
        return self.policy(batch)[0]


def micro_batch(*, is_padded=False, pieces=PIECES, advantages=True):
    rng = np.random.default_rng(0)
    members, laid = [], []
    for group, (num_prompt_tokens, lengths) in enumerate(pieces):
        prompt = rng.integers(0, 300, num_prompt_tokens).tolist()
        of_group = [
            sequence(
                group, member, float(rng.normal()) if advantages else 0.0,
                prompt + rng.integers(0, 300, length).tolist(), num_prompt_tokens,
            )
            for member, length in enumerate(lengths)
        ]  # fmt: skip
        members += of_group
        laid += [[one.tokens] for one in of_group] if is_padded else [[one.tokens for one in of_group]]
    return lay_out(laid, is_padded=is_padded), members


def checked(engine, *, loss_of=None, normaliser="tokens", ratio="token", **layout):
    batch, members = micro_batch(**layout)
    old_N = engine.evaluate(batch).float() - 0.05
    fixed = FixedLogprobs(rollout_N=old_N, old_N=old_N, reference_N=old_N - 0.1)
    config = CONFIG.model_copy(update={"normaliser": normaliser, "ratio": ratio})
    totals = loss_totals(batch.num_completion_tokens)

    def usual(batch, members, fixed, totals=totals):
        return micro_batch_loss(batch, members, totals, fixed, config, 20)

    return split_check(engine, batch, members, fixed, usual if loss_of is None else partial(loss_of, usual))


@pytest.mark.parametrize("normaliser", ["tokens", "sequence", "constant"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
@pytest.mark.parametrize("is_padded", [False, True])
def test_sequences_alone_are_what_they_are_together(is_padded, ratio, normaliser):
    found = checked(PlainEngine(is_padded=is_padded), is_padded=is_padded, ratio=ratio, normaliser=normaliser)
    assert 0 <= found["check/split_logprob"] < 1e-6
    assert 0 <= found["check/split_loss"] < 1e-6


def test_bfloat16_rounds_otherwise_alone():
    found = checked(PlainEngine(dtype=torch.bfloat16))
    assert found["check/split_logprob"] < 0.03
    assert found["check/split_loss"] < 0.03


@pytest.mark.parametrize("fault", ["leak", "positions", "batch-dependent"])
def test_a_leak_is_far_from_rounding(fault):
    found = checked(PlainEngine(fault))
    assert found["check/split_logprob"] > 0.02
    assert found["check/split_loss"] > 0.01


def test_a_normaliser_of_the_micro_batch_is_found():
    """The mean over a micro-batch's tokens instead of the step's: the loss changes and no log-prob does."""

    def mean(usual, batch, members, fixed):
        return usual(batch, members, fixed, totals=loss_totals(batch.num_completion_tokens))

    found = checked(PlainEngine(), loss_of=mean)
    assert found["check/split_logprob"] < 1e-6
    assert found["check/split_loss"] > 0.5


def test_without_advantages_a_tiny_kl_is_no_large_difference():
    assert checked(PlainEngine(), advantages=False)["check/split_loss"] < 1e-6


def test_a_single_sequence_has_nothing_to_be_split_from():
    found = checked(PlainEngine(), pieces=[(3, [7])])
    assert math.isnan(found["check/split_logprob"])
    assert math.isnan(found["check/split_loss"])


@pytest.mark.parametrize("is_padded", [False, True])
def test_what_is_computed_alone_has_no_more_tokens_than_the_micro_batch(is_padded):
    engine, sizes = PlainEngine(is_padded=is_padded), []
    evaluate = engine.evaluate
    engine.evaluate = lambda batch: sizes.append(len(batch.token_ids)) or evaluate(batch)
    checked(engine, is_padded=is_padded)
    _, together, *alone = sizes
    assert 0 < sum(alone) <= together
    assert len(alone) >= 2
