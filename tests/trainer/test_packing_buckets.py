from itertools import chain

import numpy as np
import pytest

from towline.trainer.packing_buckets import SPREAD, plan_buckets
from towline.trainer.packing_work import TOKENS_ONLY, WorkModel

WORK = WorkModel(per_token=4000, per_pair=1, per_target=500)


def plan(prompts, completions, *, num_ranks=1, max_tokens=1000, work=TOKENS_ONLY):
    return plan_buckets(prompts, completions, num_ranks=num_ranks, max_tokens=max_tokens, work=work)


def long_tailed(seed, count=300):
    return np.random.default_rng(seed).lognormal(np.log(1000), 0.9, count).clip(200, 8000).astype(int).tolist()


def test_buckets_hold_lengths_within_ten_per_cent():
    pieces, found = plan([10] * 5, [90, 80, 79, 0, 83])
    # 100, 93 and 90 | 89 | 10
    assert found.micro_batches == (((0, 1, 4), (2,), (3,)),)
    assert [(piece.members, piece.num_tokens) for piece in pieces] == [
        ((0,), 100), ((1,), 90), ((2,), 89), ((3,), 10), ((4,), 93),
    ]  # fmt: skip
    assert found.is_padded
    assert found.num_padding_tokens == 17
    assert found.padding == pytest.approx(17 / 399)
    assert found.padding_saved == pytest.approx(1 - 399 / 500)
    assert found.work == ((300, 89, 10),)


def test_padding_counts_against_the_budget():
    # three rows of 100, though the sequences have 290 tokens
    assert plan([1] * 3, [99, 94, 94], max_tokens=299)[1].micro_batches == (((0, 1), (2,)),)
    assert plan([1] * 3, [99, 94, 94], max_tokens=300)[1].micro_batches == (((0, 1, 2),),)


def test_a_sequence_over_the_budget_has_a_micro_batch_of_its_own():
    found = plan([1] * 3, [49, 99, 48], max_tokens=60)[1]
    assert found.micro_batches == (((1,), (0,), (2,)),)
    assert found.fill == pytest.approx(199 / 220)


def test_the_heaviest_are_halved_until_every_rank_has_as_many():
    found = plan([1] * 7, [99] * 4 + [49] * 3, num_ranks=4)[1]
    # 400 | 150 become 200, 200 | 150 and then 100, 100, 200 | 150
    assert sorted(chain.from_iterable(found.micro_batches)) == [(0,), (1,), (2, 3), (4, 5, 6)]


def test_ranks_without_sequences_get_empty_micro_batches():
    assert sorted(plan([1, 1], [9, 9], num_ranks=3)[1].micro_batches) == [((),), ((0,),), ((1,),)]
    assert plan([], [], num_ranks=2)[1].micro_batches == (((),), ((),))


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_is_in_one_bucket_within_the_budget(num_ranks, seed):
    lengths, prompts = long_tailed(seed), [50] * 300
    pieces, found = plan(prompts, lengths, num_ranks=num_ranks, max_tokens=16384, work=WORK)
    micro_batches = list(chain.from_iterable(found.micro_batches))
    assert sorted(chain.from_iterable(micro_batches)) == list(range(300))
    assert len({len(rank) for rank in found.micro_batches}) == 1
    for rows in filter(None, micro_batches):
        tokens = [pieces[row].num_tokens for row in rows]
        assert max(tokens) * len(rows) <= 16384
        assert max(tokens) - min(tokens) <= SPREAD * max(tokens)
    assert found == plan(prompts, lengths, num_ranks=num_ranks, max_tokens=16384, work=WORK)[1]
    assert found.padding < 0.05
    assert found.padding_saved > 0.7


@pytest.mark.parametrize("seed", range(3))
def test_ranks_have_like_work(seed):
    lengths = long_tailed(seed, count=1024)
    assert plan([50] * 1024, lengths, num_ranks=8, max_tokens=16384, work=WORK)[1].rank_imbalance < 0.02
