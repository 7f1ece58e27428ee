"""The plan of a whole step, on completions of 200 to 8,000 tokens (log-normal) and 8 ranks."""

from itertools import chain

import numpy as np
import pytest

from towline.trainer.packing_step import MICRO_BATCH_OVERHEAD, plan_step
from towline.trainer.packing_work import TOKENS_ONLY, WorkModel

MODELS = {
    "135M": WorkModel(per_token=6 * 106_000_000, per_pair=12 * 30 * 576, per_target=8 * 28_000_000),
    "7B": WorkModel(per_token=6 * 6_500_000_000, per_pair=12 * 32 * 4096, per_target=8 * 130_000_000),
}
BUDGET = 8704


class Step:
    def __init__(self, seed, *, num_groups, group_size=8):
        rng = np.random.default_rng(seed)
        self.groups = np.repeat(np.arange(num_groups), group_size).tolist()
        self.prompts = np.repeat(rng.integers(50, 500, num_groups), group_size).tolist()
        lengths = rng.lognormal(np.log(1000), 0.9, num_groups * group_size)
        self.completions = lengths.clip(200, 8000).astype(int).tolist()

    def plan(self, *, model="135M", shares_prompts=True, packing="packed", num_ranks=8, max_tokens=BUDGET):
        return plan_step(
            self.prompts, self.completions, self.groups, num_ranks=num_ranks, max_tokens=max_tokens,
            packing=packing, shares_prompts=shares_prompts, work=MODELS[model],
        )  # fmt: skip

    def tokens(self, members):
        return self.prompts[members[0]] + sum(self.completions[index] for index in members)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_every_sequence_is_placed_once_within_the_budget(model, shares_prompts, seed):
    step = Step(seed, num_groups=32)
    pieces, plan = step.plan(model=model, shares_prompts=shares_prompts)
    numbers = list(chain.from_iterable(chain.from_iterable(plan.micro_batches)))
    assert sorted(numbers) == list(range(len(pieces)))
    assert sorted(chain.from_iterable(piece.members for piece in pieces)) == list(range(256))
    for piece in pieces:
        assert len({step.groups[index] for index in piece.members}) == 1
    for micro_batch in chain.from_iterable(plan.micro_batches):
        assert sum(step.tokens(pieces[number].members) for number in micro_batch) <= BUDGET
    assert len({len(rank) for rank in plan.micro_batches}) == 1


@pytest.mark.parametrize("packing", ["packed", "buckets"])
def test_the_same_step_has_the_same_plan(packing):
    plans = [Step(0, num_groups=16).plan(packing=packing, shares_prompts=packing == "packed") for _ in range(2)]
    assert plans[0] == plans[1]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_a_large_step_fills_micro_batches_and_balances_ranks(model, shares_prompts, seed):
    _, plan = Step(seed, num_groups=512).plan(model=model, shares_prompts=shares_prompts)
    assert plan.fill >= 0.97
    assert plan.rank_imbalance <= 0.02
    assert plan.moment_imbalance <= 0.02
    assert plan.padding_saved > 0.75


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_ranks_of_few_micro_batches_are_balanced_too(model, shares_prompts, seed):
    _, plan = Step(seed, num_groups=32).plan(model=model, shares_prompts=shares_prompts)
    assert len(plan.work[0]) <= 7
    assert plan.rank_imbalance <= 0.02


@pytest.mark.parametrize("seed", range(10))
def test_no_more_micro_batches_than_the_tokens_need(seed):
    """What fill is left over is that of the last round, of which a step of few micro-batches has much."""
    _, plan = Step(seed, num_groups=128).plan(shares_prompts=False)
    assert len(plan.work[0]) == -(-plan.num_tokens // (8 * BUDGET))
    assert plan.rank_imbalance <= 0.02


def test_work_and_padding_are_those_of_the_pieces():
    step = Step(0, num_groups=16)
    pieces, plan = step.plan()
    assert any(len(piece.members) > 1 for piece in pieces)
    for rank, rank_work in zip(plan.micro_batches, plan.work, strict=True):
        for numbers, found in zip(rank, rank_work, strict=True):
            members = [pieces[number].members for number in numbers]
            wanted = sum(
                MODELS["135M"].piece(step.prompts[group[0]], [step.completions[index] for index in group])
                for group in members
            )
            assert found == wanted
    lengths = [prompt + completion for prompt, completion in zip(step.prompts, step.completions, strict=True)]
    assert plan.one_batch_tokens == 128 * max(lengths)
    assert plan.num_tokens == sum(step.tokens(piece.members) for piece in pieces)


def plan_small(groups, *, num_ranks, max_tokens, work=TOKENS_ONLY):
    rows = [(prompt, length, number) for number, (prompt, lengths) in enumerate(groups) for length in lengths]
    pieces, plan = plan_step(
        *zip(*rows, strict=True), num_ranks=num_ranks, max_tokens=max_tokens, packing="packed", shares_prompts=True,
        work=work,
    )  # fmt: skip
    return [piece.members for piece in pieces], plan


def test_groups_stay_whole_where_that_costs_nothing():
    assert plan_small([(50, [10, 10]), (50, [10, 10])], num_ranks=2, max_tokens=100)[0] == [(0, 1), (2, 3)]


def test_a_group_is_cut_where_its_prompt_costs_less_than_waiting():
    # whole: 2 + 80 on one rank, 2 + 20 on the other; cut: about 55 on each
    members, plan = plan_small([(2, [20] * 4), (2, [10, 10])], num_ranks=2, max_tokens=90)
    assert len(members) > 2
    assert plan.slowest_work < 60


def test_an_expensive_prompt_is_not_repeated():
    # cut, each rank would compute 200 for the prompts
    members, _ = plan_small([(100, [20] * 4), (100, [10, 10])], num_ranks=2, max_tokens=190)
    assert members == [(0, 1, 2, 3), (4, 5)]


def test_fewer_micro_batches_are_worth_a_repeated_prompt():
    # three pieces of 69 in three micro-batches, or six of 35 in two: 3 tokens more, one micro-batch of 105 less
    members, plan = plan_small([(1, [34, 34])] * 3, num_ranks=1, max_tokens=105)
    assert MICRO_BATCH_OVERHEAD * 105 > 3
    assert (len(members), plan.work) == (6, ((105, 105),))
