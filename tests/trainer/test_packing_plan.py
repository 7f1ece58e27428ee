from itertools import chain

import numpy as np
import pytest

from towline.trainer.packing_plan import cut_into_pieces, plan_packing

# --- micro-batches of ranks --------------------------------------------------------------------------------------


def bin_tokens(plan, num_tokens):
    return [[sum(num_tokens[index] for index in indices) for indices in rank] for rank in plan.micro_batches]


def random_lengths(seed, count=40, high=300):
    return np.random.default_rng(seed).integers(5, high, count).tolist()


def test_best_fit_by_hand():
    # longest first: 6 | 5 | 4 joins 6 (room 4, not the 5 of the other) | 3 and 2 join 5
    plan = plan_packing([6, 5, 4, 3, 2], num_ranks=1, max_tokens=10)
    assert sorted(plan.micro_batches[0]) == [(2, 0), (4, 3, 1)]
    assert plan.fill == 1.0
    assert plan.rank_imbalance == 0.0


def test_micro_batches_are_filled_evenly_where_they_can_be():
    # best fit alone would make 8 + 2; four equal pieces on two ranks make 4 + 4
    plan = plan_packing([2, 2, 2, 2], num_ranks=2, max_tokens=6)
    assert bin_tokens(plan, [2, 2, 2, 2]) == [[4], [4]]
    assert plan.rank_imbalance == 0.0
    assert plan.fill == pytest.approx(8 / 12)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_piece_is_placed_once_within_the_budget(num_ranks, seed):
    lengths = random_lengths(seed)
    plan = plan_packing(lengths, num_ranks=num_ranks, max_tokens=512)
    placed = list(chain.from_iterable(chain.from_iterable(plan.micro_batches)))
    assert sorted(placed) == list(range(len(lengths)))
    assert max(chain.from_iterable(bin_tokens(plan, lengths))) <= 512
    assert len(plan.micro_batches) == num_ranks
    assert len({len(rank) for rank in plan.micro_batches}) == 1
    for indices in chain.from_iterable(plan.micro_batches):
        assert list(indices) == sorted(indices, key=lambda index: (lengths[index], index))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_ranks_are_balanced_and_micro_batches_full(num_ranks, seed):
    lengths = random_lengths(seed, count=200)
    plan = plan_packing(lengths, num_ranks=num_ranks, max_tokens=2048)
    tokens = [sum(rank) for rank in bin_tokens(plan, lengths)]
    assert plan.rank_imbalance == pytest.approx(max(tokens) / np.mean(tokens) - 1)
    assert plan.rank_imbalance < 0.005
    needed = -(-sum(lengths) // 2048)
    assert len(plan.micro_batches[0]) <= -(-(needed + 1) // num_ranks)


def test_micro_batches_of_one_moment_have_like_sizes():
    # 7 | 5 + 4 | 5 | 4 + 4: the two larger ones run together, then the two smaller ones
    lengths = [7, 5, 5, 4, 4, 4]
    plan = plan_packing(lengths, num_ranks=2, max_tokens=10)
    moments = list(zip(*bin_tokens(plan, lengths), strict=True))
    assert [sorted(moment) for moment in moments] == [[8, 9], [5, 7]]


def test_the_rank_with_least_so_far_gets_the_largest_that_is_left():
    lengths = [10, 9, 8, 7]
    assert bin_tokens(plan_packing(lengths, num_ranks=2, max_tokens=10), lengths) == [[10, 7], [9, 8]]


def test_a_piece_over_the_budget_has_a_micro_batch_of_its_own():
    lengths = [4, 25, 3]
    plan = plan_packing(lengths, num_ranks=1, max_tokens=10)
    assert sorted(plan.micro_batches[0]) == [(1,), (2, 0)]
    assert plan.fill == pytest.approx(32 / 35)


def test_a_piece_over_the_budget_leaves_the_others_evenly_spread():
    lengths = [25, 2, 2, 2, 2]
    plan = plan_packing(lengths, num_ranks=3, max_tokens=10)
    assert sorted(bin_tokens(plan, lengths)) == [[4], [4], [25]]


def test_ranks_without_pieces_get_empty_micro_batches():
    plan = plan_packing([5, 5], num_ranks=4, max_tokens=10)
    assert sorted(plan.micro_batches) == [((),), ((),), ((0,),), ((1,),)]
    assert plan.fill == 0.25
    assert plan.rank_imbalance == 1.0


def test_no_pieces_at_all_still_give_each_rank_one_micro_batch():
    plan = plan_packing([], num_ranks=2, max_tokens=10)
    assert plan.micro_batches == (((),), ((),))
    assert (plan.fill, plan.padding_saved, plan.rank_imbalance, plan.moment_imbalance) == (0.0, 1.0, 0.0, 0.0)


def test_ties_are_broken_by_index():
    plan = plan_packing([5] * 4, num_ranks=2, max_tokens=5)
    assert plan.micro_batches == (((0,), (3,)), ((1,), (2,)))
    assert plan == plan_packing([5] * 4, num_ranks=2, max_tokens=5)


# --- work --------------------------------------------------------------------------------------------------------


def test_ranks_are_balanced_by_work_and_not_by_tokens():
    # by tokens 8 | 8; the long one is worth all others
    plan = plan_packing([8, 2, 2, 2, 2], num_ranks=2, max_tokens=20, work=[64, 16, 16, 16, 16])
    assert bin_tokens(plan, [8, 2, 2, 2, 2]) == [[8], [8]]
    plan = plan_packing([8, 4, 4, 4, 4], num_ranks=2, max_tokens=20, work=[64, 16, 16, 16, 16])
    assert sorted(plan.micro_batches) == [((0,),), ((1, 2, 3, 4),)]
    assert plan.work == ((64,), (64,))
    assert plan.rank_imbalance == plan.moment_imbalance == 0.0


def test_like_work_does_not_break_the_budget():
    # even work would be 8 | 4 + 4 + 4 + 4
    plan = plan_packing([8, 4, 4, 4, 4], num_ranks=2, max_tokens=12, work=[64, 16, 16, 16, 16])
    assert sorted(map(sorted, bin_tokens(plan, [8, 4, 4, 4, 4]))) == [[12], [12]]
    assert plan.rank_imbalance == pytest.approx(80 / 64 - 1)


def test_the_imbalance_of_ranks_and_that_of_moments_by_hand():
    plan = plan_packing([10, 9, 8, 5], num_ranks=2, max_tokens=10)
    assert plan.work == ((10, 5), (9, 8))
    assert plan.rank_imbalance == pytest.approx(17 / 16 - 1)
    assert plan.moment_imbalance == pytest.approx((10 + 8) / 16 - 1)
    assert plan.slowest_work == 18


def test_padding_saved_is_against_one_batch_of_the_longest():
    plan = plan_packing([10, 4, 6], num_ranks=1, max_tokens=20)
    assert plan.padding_saved == pytest.approx(1 - 20 / 30)
    assert plan.padding == 0.0
    assert plan_packing([10, 4], num_ranks=1, max_tokens=20, one_batch_tokens=56).padding_saved == pytest.approx(0.75)


# --- pieces ------------------------------------------------------------------------------------------------------


def cut(groups, *, num_ranks=1, max_tokens=1000, shares_prompts=True):
    """Groups as (prompt tokens, [completion tokens]); members and tokens of each piece."""
    rows = [(prompt, length, number) for number, (prompt, lengths) in enumerate(groups) for length in lengths]
    prompts, completions, numbers = zip(*rows, strict=True) if rows else ((), (), ())
    pieces = cut_into_pieces(
        prompts, completions, numbers, num_ranks=num_ranks, max_tokens=max_tokens, shares_prompts=shares_prompts
    )
    return [(piece.members, piece.num_tokens) for piece in pieces]


def test_a_group_is_one_piece_where_it_fits():
    assert cut([(5, [2, 1, 2]), (3, [4])]) == [((1, 0, 2), 10), ((3,), 7)]


def test_a_group_over_the_budget_is_cut_into_full_pieces_and_a_rest():
    # 10 beside the prompt: 7 + 3 and 5 + 1; 7 beside it: 7, 5 + 1, 3
    assert cut([(10, [7, 1, 5, 3])], max_tokens=20) == [((3, 0), 20), ((1, 2), 16)]
    assert cut([(10, [7, 1, 5, 3])], max_tokens=17) == [((0,), 17), ((1, 2), 16), ((3,), 13)]


def test_a_completion_over_the_budget_is_a_piece_of_its_own():
    assert cut([(10, [30, 1, 1])], max_tokens=11) == [((0,), 40), ((1,), 11), ((2,), 11)]


def test_fewer_groups_than_ranks_are_cut_where_pieces_are_largest():
    assert cut([(4, [8] * 4), (4, [2] * 4)], num_ranks=3) == [((0, 2), 20), ((1, 3), 20), ((4, 5, 6, 7), 12)]
    assert [len(members) for members, _ in cut([(4, [8] * 8)], num_ranks=3)] == [3, 3, 2]


def test_a_completion_is_never_cut():
    assert cut([(4, [8, 8])], num_ranks=5) == [((0,), 12), ((1,), 12)]
    assert cut([], num_ranks=2) == []


def test_without_shared_prompts_every_completion_is_a_piece():
    assert cut([(5, [2, 1]), (3, [4])], shares_prompts=False) == [((0,), 7), ((1,), 6), ((2,), 7)]


def test_completions_without_tokens_are_divided_too():
    assert cut([(5, [3, 0, 0])], num_ranks=3) == [((0,), 8), ((1,), 5), ((2,), 5)]


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_every_completion_is_in_one_piece_of_its_group(num_ranks, shares_prompts, seed):
    rng = np.random.default_rng(seed)
    groups = [(int(rng.integers(1, 60)), rng.integers(0, 90, rng.integers(1, 9)).tolist()) for _ in range(6)]
    group_of = [number for number, (_, lengths) in enumerate(groups) for _ in lengths]
    lengths = [length for _, lengths in groups for length in lengths]
    pieces = cut(groups, num_ranks=num_ranks, max_tokens=150, shares_prompts=shares_prompts)
    assert sorted(chain.from_iterable(members for members, _ in pieces)) == list(range(len(group_of)))
    for members, num_tokens in pieces:
        (number,) = {group_of[index] for index in members}
        assert num_tokens == groups[number][0] + sum(lengths[index] for index in members) <= 150
    assert len(pieces) >= min(num_ranks, len(group_of))
