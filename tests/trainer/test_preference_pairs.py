import numpy as np

from scored_groups import NAN, completion, scored_group
from towline.storage.records import FinishReason
from towline.trainer.preference_pairs import ranked_pairs


def group(*rewards, finish=None):
    """Completion i has the one token 10 + i, log-prob -i and version i."""
    completions = [
        completion([10 + i], [-float(i)], version=i, finish_reason=(finish or {}).get(i, FinishReason.STOP))
        for i in range(len(rewards))
    ]
    return scored_group([1, 2], completions, rewards)


def members(pairs):
    return [(pair.tokens.chosen.token_ids[-1] - 10, pair.tokens.rejected.token_ids[-1] - 10) for pair in pairs]


def test_the_best_completion_of_a_group_is_chosen_and_its_worst_rejected():
    (pair,) = ranked_pairs([group(0.5, 2.0, -1.0, 1.0)], 1)
    assert members([pair]) == [(1, 2)]
    assert pair.reward_gap == 3.0
    assert pair.tokens.chosen.token_ids.tolist() == [1, 2, 11]
    assert pair.tokens.chosen.num_prompt_tokens == pair.tokens.rejected.num_prompt_tokens == 2
    assert [logprobs.tolist() for logprobs in pair.rollout_logprobs] == [[-1.0], [-2.0]]
    assert [versions.tolist() for versions in pair.versions] == [[1], [2]]


def test_further_pairs_are_of_the_next_best_with_the_next_worst_and_no_completion_is_in_two():
    assert members(ranked_pairs([group(5.0, 1.0, 4.0, 3.0, 2.0)], 9)) == [(0, 1), (2, 4)]
    assert members(ranked_pairs([group(5.0, 1.0, 4.0, 3.0, 2.0)], 1)) == [(0, 1)]


def test_equal_rewards_make_no_pair_and_of_right_and_wrong_answers_as_many_as_the_fewer():
    assert ranked_pairs([group(1.0, 1.0, 1.0)], 3) == []
    assert members(ranked_pairs([group(0.0, 1.0, 0.0, 1.0, 0.0)], 3)) == [(1, 4), (3, 2)]
    assert members(ranked_pairs([group(0.0, 0.0, 1.0, 0.0)], 3)) == [(2, 3)]


def test_what_has_no_score_or_was_taken_back_is_in_no_pair():
    assert members(ranked_pairs([group(NAN, 1.0, 0.0, NAN)], 2)) == [(1, 2)]
    assert members(ranked_pairs([group(9.0, 1.0, 0.0, finish={0: FinishReason.ABORTED})], 1)) == [(1, 2)]
    assert ranked_pairs([group(NAN, 1.0)], 1) == []


def test_the_same_text_with_two_rewards_teaches_nothing_and_is_no_pair():
    same = scored_group([1], [completion([7, 8]), completion([7, 8])], [1.0, 0.0])
    assert ranked_pairs([same], 1) == []


def test_pairs_stand_in_the_order_of_their_groups_and_know_them():
    pairs = ranked_pairs([group(0.0, 1.0), group(2.0, 2.0), group(1.0, 0.0)], 1)
    assert [pair.tokens.row for pair in pairs] == [0, 2]
    assert np.all([pair.reward_gap == 1.0 for pair in pairs])
