"""Where pairs go, and that it changes nothing: neither scores, nor the loss, nor its gradient."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from tiny_models import VARLEN, small_llama
from towline.trainer.packing import TokenSequence
from towline.trainer.packing_pairs import lay_out_pairs, plan_pairs
from towline.trainer.packing_work import TOKENS_ONLY, WorkModel
from towline.trainer.policy import Policy
from towline.trainer.preference_losses import completion_logprobs, preference_loss
from towline.trainer.token_examples import TokenPair

WAYS = [("packed", True), ("packed", False), ("buckets", False)]
every_way = pytest.mark.parametrize(("packing", "shares_prompts"), WAYS)


def planned(sizes, *, num_ranks=1, max_tokens=1000, packing="packed", shares_prompts=True, work=TOKENS_ONLY):
    """Pairs as (prompt, chosen, rejected) tokens."""
    prompts, chosen, rejected = zip(*sizes, strict=True) if sizes else ((), (), ())
    return plan_pairs(
        prompts, chosen, rejected, num_ranks=num_ranks, max_tokens=max_tokens, packing=packing,
        shares_prompts=shares_prompts, work=work,
    )  # fmt: skip


def computed_tokens(sizes, packing, shares_prompts):
    """Of a micro-batch of such pairs, padding included."""
    if packing == "buckets":
        return 2 * len(sizes) * max((prompt + max(pair) for prompt, *pair in sizes), default=0)
    return sum((prompt if shares_prompts else 2 * prompt) + sum(pair) for prompt, *pair in sizes)


def random_sizes(seed, count=40, high=90):
    return np.random.default_rng(seed).integers(1, high, (count, 3)).tolist()


# --- the plan ----------------------------------------------------------------------------------------------------


def test_a_shared_prompt_counts_once():
    sizes = [(10, 3, 2), (4, 1, 5)]
    assert planned(sizes).num_tokens == 25
    assert planned(sizes, shares_prompts=False).num_tokens == 39
    assert planned(sizes, max_tokens=25).micro_batches == (((1, 0),),)
    assert planned(sizes, max_tokens=24).micro_batches == (((0,), (1,)),)


def test_padding_saved_is_against_one_batch_of_the_longest_row():
    """Four rows of 13."""
    assert planned([(10, 3, 2), (4, 1, 5)]).padding_saved == pytest.approx(1 - 25 / 52)


def test_rows_by_hand():
    """Rows of 13, 12, 5 and 9 tokens; two of a pair to a micro-batch, as long as the longer: 26 and 18."""
    plan = planned([(10, 3, 2), (4, 1, 5)], max_tokens=26, packing="buckets", shares_prompts=False)
    assert plan.micro_batches == (((0,), (1,)),)
    assert plan.is_padded
    assert (plan.num_tokens, plan.num_padding_tokens, plan.capacity) == (39, 44 - 39, 52)
    assert plan.work == ((26, 18),)
    assert plan.one_batch_tokens == 52
    like = planned([(10, 3, 2), (10, 2, 1)], max_tokens=52, packing="buckets", shares_prompts=False)
    assert like.micro_batches == (((0, 1),),)
    assert like.num_padding_tokens == 52 - 48


def test_work_is_that_of_the_attention_too():
    """2 a token, 1 a pair of tokens: a shared prompt of 2 is 3 pairs; completions of 1 and 3 are 3 and 12 pairs."""
    work = WorkModel(per_token=2, per_pair=1)
    assert planned([(2, 1, 3)], work=work).work == ((2 * 6 + 3 + 3 + 12,),)
    assert planned([(2, 1, 3)], work=work, shares_prompts=False).work == ((2 * 8 + 6 + 15,),)


@every_way
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(4))
def test_every_pair_is_placed_once_within_the_budget(packing, shares_prompts, num_ranks, seed):
    sizes = random_sizes(seed)
    plan = planned(sizes, num_ranks=num_ranks, max_tokens=600, packing=packing, shares_prompts=shares_prompts)
    micro_batches = list(chain.from_iterable(plan.micro_batches))
    assert sorted(chain.from_iterable(micro_batches)) == list(range(len(sizes)))
    assert len(plan.micro_batches) == num_ranks
    assert len({len(rank) for rank in plan.micro_batches}) == 1
    found = [
        computed_tokens([sizes[number] for number in numbers], packing, shares_prompts) for numbers in micro_batches
    ]
    assert max(found) <= 600
    assert sum(found) == plan.num_tokens + plan.num_padding_tokens
    assert plan.capacity == 600 * len(micro_batches)


@every_way
def test_a_pair_over_the_budget_is_alone(packing, shares_prompts):
    """Also where each of its completions would fit."""
    sizes = [(10, 8, 8), (3, 2, 2), (3, 2, 2)]
    plan = planned(sizes, max_tokens=24, packing=packing, shares_prompts=shares_prompts)
    assert (0,) in plan.micro_batches[0]
    assert sorted(chain.from_iterable(plan.micro_batches[0])) == [0, 1, 2]


@every_way
def test_fewer_pairs_than_ranks_leave_empty_micro_batches(packing, shares_prompts):
    plan = planned([(3, 2, 2)], num_ranks=3, packing=packing, shares_prompts=shares_prompts)
    assert sorted(plan.micro_batches) == [((),), ((),), ((0,),)]
    none = planned([], num_ranks=2, packing=packing, shares_prompts=shares_prompts)
    assert none.micro_batches == (((),), ((),))


@every_way
def test_the_plan_is_the_same_on_every_rank(packing, shares_prompts):
    options = {"num_ranks": 4, "max_tokens": 300, "packing": packing, "shares_prompts": shares_prompts}
    assert planned(random_sizes(7), **options) == planned(random_sizes(7), **options)


def test_ranks_are_balanced():
    assert planned(random_sizes(3, count=200), num_ranks=4, max_tokens=2048).rank_imbalance < 0.005


# --- the layout --------------------------------------------------------------------------------------------------


def sequence(*token_ids, prompt):
    return TokenSequence(token_ids=np.array(token_ids), num_prompt_tokens=prompt)


TWO = [
    TokenPair(row=0, margin=None, chosen=sequence(1, 2, 3, 4, prompt=2), rejected=sequence(1, 2, 5, prompt=2)),
    TokenPair(row=0, margin=None, chosen=sequence(6, 7, prompt=1), rejected=sequence(6, 8, 9, prompt=1)),
]


@pytest.mark.parametrize(
    ("options", "token_ids", "last_index"),
    [
        ({"is_padded": False, "shares_prompts": True}, [1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 4, 6, 8]),
        ({"is_padded": False, "shares_prompts": False}, [1, 2, 3, 4, 1, 2, 5, 6, 7, 6, 8, 9], [3, 6, 8, 11]),
        (
            {"is_padded": True, "shares_prompts": False},
            [1, 2, 3, 4, 1, 2, 5, 0, 6, 7, 0, 0, 6, 8, 9, 0],
            [3, 6, 9, 14],
        ),
    ],
)
def test_chosen_and_rejected_take_turns(options, token_ids, last_index):
    batch = lay_out_pairs(TWO, **options)
    assert batch.token_ids.tolist() == token_ids
    assert batch.target_ids.tolist() == [3, 4, 5, 7, 8, 9]
    assert batch.num_completion_tokens == (2, 1, 1, 2)
    assert batch.last_index.tolist() == last_index
    assert batch.shares_prompts == options["shares_prompts"]


@pytest.mark.parametrize("is_padded", [False, True])
def test_no_pairs_are_a_dummy(is_padded):
    batch = lay_out_pairs([], is_padded=is_padded, shares_prompts=False)
    assert batch.num_completion_tokens == ()
    assert len(batch.last_index) == 0


def test_prompts_that_differ_cannot_be_shared():
    pair = TokenPair(row=0, margin=None, chosen=sequence(1, 2, 3, prompt=2), rejected=sequence(1, 4, 3, prompt=2))
    with pytest.raises(AssertionError, match="two prompts"):
        lay_out_pairs([pair], is_padded=False, shares_prompts=True)


# --- however they lie, the loss is the same ----------------------------------------------------------------------

SIZES = [(5, 31, 4), (9, 2, 40), (1, 25, 7), (12, 3, 3), (2, 1, 1)]


class Data:
    def __init__(self):
        rng = np.random.default_rng(0)
        self.pairs = []
        for num_prompt_tokens, *lengths in SIZES:
            prompt = rng.integers(0, 300, num_prompt_tokens)
            chosen, rejected = (
                TokenSequence(
                    token_ids=np.concatenate([prompt, rng.integers(0, 300, length)]),
                    num_prompt_tokens=num_prompt_tokens,
                )
                for length in lengths
            )
            self.pairs.append(TokenPair(row=0, margin=None, chosen=chosen, rejected=rejected))
        self.reference_P2 = torch.from_numpy(rng.normal(-60, 20, (len(SIZES), 2)))

    def run(self, micro_batches, *, is_padded=False, shares_prompts=True):
        """The log-probs of each pair, the loss and its gradient."""
        model = small_llama("sdpa" if is_padded else VARLEN, initializer_range=0.06).double()
        policy = Policy(model, 1.0)
        logprobs, total = {}, 0.0
        for numbers in micro_batches:
            batch = lay_out_pairs(
                [self.pairs[number] for number in numbers], is_padded=is_padded, shares_prompts=shares_prompts
            )
            policy_P2 = completion_logprobs(policy(batch)[0], batch.num_completion_tokens).view(-1, 2)
            loss = preference_loss(
                *policy_P2.unbind(1), *self.reference_P2[list(numbers)].unbind(1), beta=0.1
            ).losses_P.sum() / len(SIZES)
            loss.backward()
            total += loss.item()
            logprobs |= zip(numbers, policy_P2.detach(), strict=True)
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        return torch.stack([logprobs[number] for number in range(len(SIZES))]), total, gradient


@pytest.fixture(scope="module")
def data():
    return Data()


@pytest.fixture(scope="module")
def alone(data):
    return data.run([[number] for number in range(len(SIZES))], shares_prompts=False)


def assert_same(found, wanted):
    assert (found[0] - wanted[0]).abs().max() < 1e-6
    assert abs(found[1] - wanted[1]) < 1e-6 * abs(wanted[1])
    assert (found[2] - wanted[2]).norm() < 1e-6 * wanted[2].norm()


@pytest.mark.parametrize("shares_prompts", [True, False])
def test_packed_pairs_are_as_each_alone(shares_prompts, data, alone):
    assert alone[1] > 0.1
    assert alone[2].norm() > 1e-3
    assert_same(data.run([[0, 1, 2, 3, 4]], shares_prompts=shares_prompts), alone)
    assert_same(data.run([[4, 2], [], [0, 3, 1]], shares_prompts=shares_prompts), alone)


def test_padded_pairs_are_as_each_alone(data, alone):
    assert_same(data.run([[3, 0, 4], [2, 1]], is_padded=True, shares_prompts=False), alone)


@every_way
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_no_plan_of_pairs_changes_anything(packing, shares_prompts, num_ranks, data, alone):
    plan = planned(SIZES, num_ranks=num_ranks, max_tokens=80, packing=packing, shares_prompts=shares_prompts)
    micro_batches = list(chain.from_iterable(plan.micro_batches))
    assert_same(data.run(micro_batches, is_padded=plan.is_padded, shares_prompts=shares_prompts), alone)


@every_way
@torch.no_grad()
def test_no_completion_sees_another_of_its_micro_batch(packing, shares_prompts, data):
    """Changing the tokens of one completion moves no log-prob of any other, by not one bit."""
    is_padded = packing == "buckets"
    policy = Policy(small_llama("sdpa" if is_padded else VARLEN, initializer_range=0.06), 1.0)
    batch = lay_out_pairs(data.pairs, is_padded=is_padded, shares_prompts=shares_prompts)
    before = policy(batch)[0].split(list(batch.num_completion_tokens))
    bounds = np.cumsum([0, *batch.num_completion_tokens])
    for changed in range(len(before)):
        token_ids = batch.token_ids.copy()
        places = batch.completion_index[bounds[changed] : bounds[changed + 1]]
        token_ids[places] = (token_ids[places] + 1) % 300
        after = policy(replace(batch, token_ids=token_ids))[0].split(list(batch.num_completion_tokens))
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            if number != changed:
                assert torch.equal(old, new), (changed, number)
            elif len(old) > 1:
                assert not torch.equal(old, new)
