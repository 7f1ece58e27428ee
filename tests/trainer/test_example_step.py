"""Micro-batches of examples of which some tokens are read and not predicted."""

import numpy as np
import pytest

from towline.trainer.example_step import only
from towline.trainer.packing import TokenSequence, pack, pack_pieces
from towline.trainer.packing_rows import pad_rows


def sequence(*token_ids, prompt):
    return TokenSequence(token_ids=np.array(token_ids), num_prompt_tokens=prompt)


TWO = [sequence(10, 11, 12, 13, 14, prompt=2), sequence(20, 21, 22, prompt=1)]
WANTED = [np.array([True, False, True]), np.array([False, True])]


def test_what_is_predicted_by_hand():
    batch = only(pack(TWO), WANTED)
    assert batch.target_ids.tolist() == [12, 14, 22]
    assert batch.logit_index.tolist() == [1, 3, 6]
    assert batch.completion_index.tolist() == [2, 4, 7]
    assert batch.num_completion_tokens == (2, 1)
    assert batch.last_index.tolist() == [4, 7]


def test_all_tokens_are_read():
    whole, batch = pack(TWO), only(pack(TWO), WANTED)
    for name in ("token_ids", "position_ids", "cu_seq_lens", "prefixes"):
        assert getattr(batch, name).tolist() == getattr(whole, name).tolist(), name
    assert batch.max_length == whole.max_length


def test_padded_rows_predict_the_same_tokens():
    batch = only(pad_rows(TWO), WANTED)
    assert batch.target_ids.tolist() == [12, 14, 22]
    assert batch.token_ids[batch.completion_index].tolist() == [12, 14, 22]


def test_a_shared_prompt_predicts_first_tokens_from_its_end():
    shared = pack_pieces([[sequence(1, 2, 3, prompt=2), sequence(1, 2, 4, 5, prompt=2)]])
    batch = only(shared, [np.array([True]), np.array([True, False])])
    assert batch.target_ids.tolist() == [3, 4]
    assert batch.logit_index.tolist() == [1, 1]


def test_everything_and_nothing():
    whole = only(pack(TWO), [np.ones(3, dtype=np.bool_), np.ones(2, dtype=np.bool_)])
    assert whole.target_ids.tolist() == pack(TWO).target_ids.tolist()
    none = only(pack(TWO), [np.zeros(3, dtype=np.bool_), np.zeros(2, dtype=np.bool_)])
    assert (none.target_ids.tolist(), none.num_completion_tokens) == ([], (0, 0))


def test_an_empty_micro_batch_stays_one():
    batch = only(pack([]), [])
    assert (batch.target_ids.tolist(), batch.num_completion_tokens) == ([], ())
    assert batch.token_ids.tolist() == pack([]).token_ids.tolist()


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(IndexError):
        only(pack(TWO), [np.ones(3, dtype=np.bool_), np.ones(3, dtype=np.bool_)])
