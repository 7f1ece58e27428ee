from dataclasses import fields
from itertools import chain

import numpy as np
import pytest
import torch

from tiny_models import VARLEN, small_llama
from towline.trainer.losses import policy_loss
from towline.trainer.normaliser import loss_totals, token_weights
from towline.trainer.packing import TokenSequence, pack, pack_pieces
from towline.trainer.packing_plan import cut_into_pieces, plan_packing
from towline.trainer.packing_rows import pad_rows
from towline.trainer.policy import Policy, load_policy

# --- the arrays --------------------------------------------------------------------------------------------------


def sequence(*token_ids, prompt):
    return TokenSequence(token_ids=np.array(token_ids, dtype=np.int32), num_prompt_tokens=prompt)


def test_flat_arrays_by_hand():
    batch = pack([sequence(10, 11, 12, 13, 14, prompt=3), sequence(20, 21, 22, prompt=1)])
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 20, 21, 22]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.cu_seq_lens.tolist() == [0, 5, 8]
    assert batch.cu_seq_lens.dtype == batch.prefixes.dtype == np.int32
    assert not batch.shares_prompts
    assert batch.max_length == 5
    assert batch.logit_index.tolist() == [2, 3, 5, 6]
    assert batch.target_ids.tolist() == [13, 14, 21, 22]
    assert batch.completion_index.tolist() == [3, 4, 6, 7]
    assert batch.last_index.tolist() == [4, 7]
    assert batch.num_completion_tokens == (2, 2)


def test_a_prompt_is_laid_out_once_for_the_completions_of_its_piece():
    first = [
        sequence(10, 11, 12, 1, 2, prompt=3),
        sequence(10, 11, 12, 3, prompt=3),
        sequence(10, 11, 12, 4, 5, prompt=3),
    ]
    batch = pack_pieces([first, [sequence(20, 6, 7, prompt=1)]])
    assert batch.token_ids.tolist() == [10, 11, 12, 1, 2, 3, 4, 5, 20, 6, 7]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 3, 3, 4, 0, 1, 2]
    assert batch.cu_seq_lens.tolist() == [0, 5, 6, 8, 11]
    assert batch.prefixes.tolist() == [[0, 0], [0, 3], [0, 3], [0, 0]]
    assert batch.shares_prompts
    assert batch.max_length == 5
    # the prompt's last token, at 2, predicts the first token of each completion
    assert batch.logit_index.tolist() == [2, 3, 2, 2, 6, 8, 9]
    assert batch.target_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    # where they lie themselves: not one further on than what predicts them
    assert batch.completion_index.tolist() == [3, 4, 5, 6, 7, 9, 10]
    assert batch.last_index.tolist() == [4, 5, 7, 10]
    assert batch.num_completion_tokens == (2, 1, 2, 2)


def test_a_prefix_is_counted_from_the_beginning_of_the_row():
    piece = [sequence(1, 2, 3, prompt=2), sequence(1, 2, 4, prompt=2)]
    batch = pack_pieces([piece, piece])
    assert batch.cu_seq_lens.tolist() == [0, 3, 4, 7, 8]
    assert batch.prefixes.tolist() == [[0, 0], [0, 2], [0, 0], [4, 2]]
    assert batch.logit_index.tolist() == [1, 1, 5, 5]


def test_a_piece_of_one_completion_is_a_sequence():
    batches = [pack([sequence(1, 2, 3, prompt=1)]), pack_pieces([[sequence(1, 2, 3, prompt=1)]])]
    first, second = ([getattr(batch, item.name) for item in fields(batch)] for batch in batches)
    assert all(np.array_equal(one, other) for one, other in zip(first, second, strict=True))


def test_completions_without_tokens_have_no_segment():
    empty = sequence(1, 2, prompt=2)
    batch = pack_pieces([[empty, empty, sequence(1, 2, 5, prompt=2), empty]])
    assert batch.token_ids.tolist() == [1, 2, 5]
    assert batch.cu_seq_lens.tolist() == [0, 2, 3]
    assert batch.prefixes.tolist() == [[0, 0], [0, 2]]
    assert (batch.logit_index.tolist(), batch.target_ids.tolist()) == ([1], [5])
    assert batch.num_completion_tokens == (0, 0, 1, 0)


def test_two_prompts_in_one_piece_are_refused():
    for other in (sequence(1, 9, 3, prompt=2), sequence(1, 2, 3, prompt=1)):
        with pytest.raises(AssertionError, match="two prompts"):
            pack_pieces([[sequence(1, 2, 3, prompt=2), other]])


def test_targets_are_the_completion_by_length_whatever_its_tokens_are():
    # G3-20: no end-of-text token (2), and a completion may well contain the padding token (0)
    batch = pack([sequence(7, 5, 6, prompt=1), sequence(7, 0, 0, 2, 0, prompt=1)])
    assert batch.target_ids.tolist() == [5, 6, 0, 0, 2, 0]


def test_a_completion_without_tokens_has_no_target():
    batch = pack([sequence(1, 2, prompt=2), sequence(3, 4, prompt=1)])
    assert batch.target_ids.tolist() == [4]
    assert batch.num_completion_tokens == (0, 1)
    assert batch.gather([[], [0.5]]).tolist() == [0.5]


def test_gather_and_spread_follow_the_targets():
    batch = pack([sequence(1, 2, 3, prompt=1), sequence(4, 5, prompt=1)])
    gathered = batch.gather([np.array([0.25, 0.5]), np.array([0.75])])
    assert gathered.tolist() == [0.25, 0.5, 0.75]
    assert gathered.dtype == np.float32
    assert batch.spread([1.0, -1.0]).tolist() == [1.0, 1.0, -1.0]


@pytest.mark.parametrize("values", [[[1.0], [1.0]], [[1.0, 1.0, 1.0], [1.0]], [[1.0, 1.0]]])
def test_gather_refuses_values_of_other_lengths(values):
    batch = pack([sequence(1, 2, 3, prompt=1), sequence(4, 5, prompt=1)])
    with pytest.raises(AssertionError, match=r"need \(2, 1\)"):
        batch.gather(values)


@pytest.mark.parametrize("prompt", [0, 4])
def test_a_prompt_of_impossible_length_is_refused(prompt):
    with pytest.raises(AssertionError, match="need at least one"):
        pack([sequence(1, 2, 3, prompt=prompt)])


def test_nothing_is_a_dummy_without_targets():
    batch = pack([])
    assert batch.token_ids.tolist() == [0, 0]
    assert batch.cu_seq_lens.tolist() == [0, 2]
    assert len(batch.logit_index) == len(batch.target_ids) == len(batch.gather([])) == len(batch.spread([])) == 0
    assert len(batch.completion_index) == len(batch.last_index) == 0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("is_shared", [True, False])
def test_completion_tokens_are_found_at_their_places(is_shared, seed):
    rng = np.random.default_rng(seed)
    pieces = []
    for _ in range(4):
        prompt = rng.integers(0, 300, rng.integers(1, 6)).tolist()
        tails = [rng.integers(0, 300, rng.integers(1, 9)).tolist() for _ in range(3)]
        pieces.append([sequence(*prompt, *tail, prompt=len(prompt)) for tail in tails])
    items = list(chain.from_iterable(pieces))
    for batch in (pack_pieces(pieces if is_shared else [[item] for item in items]), pad_rows(items)):
        assert (batch.token_ids[batch.completion_index] == batch.target_ids).all()
        assert batch.token_ids[batch.last_index].tolist() == [item.token_ids[-1] for item in items]
        assert batch.completion_index.dtype == batch.last_index.dtype == np.int64
        # behind the token that predicts it, or first of a completion that shares its prompt
        firsts = np.cumsum([0, *batch.num_completion_tokens[:-1]])
        is_behind = batch.completion_index == batch.logit_index + 1
        assert is_behind[np.setdiff1d(np.arange(len(is_behind)), firsts)].all()
        assert is_behind[firsts].all() == (not batch.shares_prompts)


def test_a_completion_without_tokens_has_no_last_one():
    with pytest.raises(AssertionError, match="has no last one"):
        _ = pack([sequence(1, 2, prompt=2), sequence(3, 4, prompt=1)]).last_index


# --- shared = unshared = padded ----------------------------------------------------------------------------------

GROUPS = [(3, [9, 2, 9, 5]), (7, [2, 8]), (2, [17]), (5, [1, 12, 3, 6])]
"""Tokens of the prompt, and of its completions."""
MODELS = {
    "gqa": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
}


def tiny_llama(kind, attention=VARLEN):
    return small_llama(attention, initializer_range=0.06, **MODELS[kind])


class Data:
    """Sequences by index, and what the loss needs of each completion; the weights are those of the whole step."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.sequences, self.groups = [], []
        for group, (num_prompt_tokens, lengths) in enumerate(GROUPS):
            prompt = rng.integers(0, 300, num_prompt_tokens)
            for length in lengths:
                token_ids = np.concatenate([prompt, rng.integers(0, 300, length)])
                self.sequences.append(TokenSequence(token_ids=token_ids, num_prompt_tokens=num_prompt_tokens))
                self.groups.append(group)
        self.prompts = [item.num_prompt_tokens for item in self.sequences]
        self.lengths = [len(item.token_ids) - item.num_prompt_tokens for item in self.sequences]
        self.old, self.reference = ([rng.normal(-5.7, 0.3, length) for length in self.lengths] for _ in range(2))
        self.advantages = rng.normal(size=len(self.lengths))
        self.weights = token_weights(self.lengths, "tokens", totals=loss_totals(self.lengths))

    def loss(self, logprobs_N, batch, chosen):
        def gather(values):
            return torch.from_numpy(batch.gather([values[index] for index in chosen]))

        return policy_loss(
            logprobs_N, gather(self.old), torch.from_numpy(batch.spread(self.advantages[list(chosen)])),
            gather(self.weights), reference_logprobs_T=gather(self.reference), kl_beta=0.1,
        ).loss  # fmt: skip

    def planned(self, *, num_ranks, max_tokens, shares_prompts):
        """Micro-batches of all ranks, each as a list of pieces of indices."""
        pieces = cut_into_pieces(
            self.prompts, self.lengths, self.groups,
            num_ranks=num_ranks, max_tokens=max_tokens, shares_prompts=shares_prompts,
        )  # fmt: skip
        plan = plan_packing([piece.num_tokens for piece in pieces], num_ranks=num_ranks, max_tokens=max_tokens)
        return [[pieces[number].members for number in numbers] for rank in plan.micro_batches for numbers in rank]


@pytest.fixture(scope="module")
def data():
    return Data()


def packed_loss(policy, pieces, data):
    batch = pack_pieces([[data.sequences[index] for index in piece] for piece in pieces])
    return data.loss(policy(batch)[0], batch, list(chain.from_iterable(pieces)))


def padded_loss(model, data):
    """The plain way: right padding, an attention mask, logits of everything, a loop over the completions."""
    sequences = data.sequences
    longest = max(len(item.token_ids) for item in sequences)
    ids_BT, mask_BT = torch.zeros(2, len(sequences), longest, dtype=torch.int64)
    for row, item in enumerate(sequences):
        ids_BT[row, : len(item.token_ids)] = torch.from_numpy(item.token_ids)
        mask_BT[row, : len(item.token_ids)] = 1
    logprobs_BTV = torch.log_softmax(model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits, -1)
    logprobs_N = torch.cat(
        [
            logprobs_BTV[row, item.num_prompt_tokens - 1 : len(item.token_ids) - 1]
            .gather(-1, torch.from_numpy(item.token_ids[item.num_prompt_tokens :])[:, None])
            .squeeze(-1)
            for row, item in enumerate(sequences)
        ]
    )
    return data.loss(logprobs_N, pack(sequences), range(len(sequences)))


def loss_and_gradients(model, losses):
    total = 0.0
    for loss in losses:
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


def packed(policy, micro_batches, data):
    return loss_and_gradients(policy.model, (packed_loss(policy, pieces, data) for pieces in micro_batches))


@pytest.fixture(scope="module")
def padded(data):
    """Of each kind of model."""
    return {
        kind: loss_and_gradients(model, [padded_loss(model, data)])
        for kind, model in ((kind, tiny_llama(kind, "sdpa")) for kind in MODELS)
    }


def assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).abs().max() < 1e-5 * gradient.abs().max(), name


WHOLE = [[(0, 1, 2, 3), (4, 5), (6,), (7, 8, 9, 10)]]
UNSHARED = [[(index,) for index in range(11)]]
SPLIT = [[(1, 3), (6,)], [(2, 0), (8,)], [(5, 4)], [(9, 7, 10)]]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "micro_batches",
    [
        WHOLE,
        [[piece] for piece in WHOLE[0]],
        SPLIT,
        UNSHARED,
        [[piece] for piece in UNSHARED[0]],
        [[], *SPLIT[:2], [], *SPLIT[2:]],
    ],
    ids=["groups", "a group each", "groups split", "unshared", "a sequence each", "with empty ones"],
)
def test_packed_loss_and_gradient_equal_padded_ones(kind, micro_batches, data, padded):
    assert_same(packed(Policy(tiny_llama(kind), 1.0), micro_batches, data), padded[kind])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shares_prompts", [True, False])
@pytest.mark.parametrize(("num_ranks", "max_tokens"), [(1, 1000), (2, 24), (2, 1000), (3, 16), (8, 1000)])
def test_planned_micro_batches_of_all_ranks_equal_padded_ones(
    kind, shares_prompts, num_ranks, max_tokens, data, padded
):
    micro_batches = data.planned(num_ranks=num_ranks, max_tokens=max_tokens, shares_prompts=shares_prompts)
    assert any(len(piece) > 1 for pieces in micro_batches for piece in pieces) == shares_prompts
    assert_same(packed(Policy(tiny_llama(kind), 1.0), micro_batches, data), padded[kind])


@pytest.mark.parametrize(("attention", "shares_prompts"), [(None, True), ("sdpa", False)])
def test_a_policy_says_whether_it_shares_prompts(attention, shares_prompts, data, padded, tmp_path):
    tiny_llama("tied").save_pretrained(tmp_path)
    policy = load_policy(tmp_path, temperature=1.0, precision="float32", attention=attention)
    assert policy.shares_prompts == shares_prompts
    micro_batches = data.planned(num_ranks=2, max_tokens=40, shares_prompts=policy.shares_prompts)
    assert_same(packed(policy, micro_batches, data), padded["tied"])


def test_a_policy_that_does_not_share_prompts_takes_no_pieces_that_do(data):
    with pytest.raises(AssertionError, match="shares_prompts"):
        packed(Policy(tiny_llama("gqa", "sdpa"), 1.0), WHOLE, data)


@torch.no_grad()
def test_what_a_sequence_is_packed_with_moves_its_bf16_logprobs_by_rounding_only(data):
    # G3-46: chunks of 1 and of 8 sequences
    policy = Policy(tiny_llama("gqa").bfloat16(), 1.0)
    alone = torch.cat([policy(pack([item]))[0] for item in data.sequences[:8]])
    log_ratio = policy(pack(data.sequences[:8]))[0] - alone
    assert log_ratio.mean().abs() < 0.005
    assert ((log_ratio.exp() < 0.9) | (log_ratio.exp() > 1.1)).float().mean() < 0.08


def test_gradient_checkpointing_changes_nothing(data, padded):
    policy = Policy(tiny_llama("gqa").train(), 1.0)
    policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_same(packed(policy, SPLIT, data), padded["gqa"])


def test_an_empty_micro_batch_gives_every_parameter_a_gradient_of_zeros(data):
    loss, gradients = packed(Policy(tiny_llama("gqa"), 1.0), [[]], data)
    assert loss == 0.0
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())
