"""In float64: no way of putting sequences together changes a log-prob, the loss or the gradient."""

from itertools import chain

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tiny_models import VARLEN, small_llama
from towline.trainer.packing import TokenSequence
from towline.trainer.packing_rows import lay_out
from towline.trainer.packing_step import plan_step
from towline.trainer.policy import Policy

TOLERANCE = 1e-10
GROUPS = [(5, [31, 4, 18, 18]), (9, [2, 40, 11, 1]), (1, [25, 7]), (12, [3, 3, 60])]
"""Tokens of the prompt, and of its completions."""


class Float64Norm(torch.nn.Module):
    """That of transformers computes in float32 whatever it is given: the gradients of a prompt's tokens, added up over
    its completions before or after, would differ by 1e-8."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, hidden):
        return self.weight * torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], eps=self.eps)


def policy(attention=VARLEN):
    model = small_llama(attention, max_position_embeddings=128, initializer_range=0.06).double()
    for name, module in list(model.named_modules()):
        if isinstance(module, LlamaRMSNorm):
            model.set_submodule(name, Float64Norm(module))
    return Policy(model, 0.7)


class Data:
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
        self.weights = [torch.from_numpy(rng.normal(size=length)) for length in self.lengths]

    def run(self, micro_batches, *, is_padded=False):
        """Log-probs of each sequence, the loss and its gradient; micro-batches as lists of pieces of indices."""
        model = policy("sdpa" if is_padded else VARLEN)
        logprobs, total = {}, 0.0
        for pieces in micro_batches:
            batch = lay_out([[self.sequences[index] for index in piece] for piece in pieces], is_padded=is_padded)
            indices = list(chain.from_iterable(pieces))
            found_N = model(batch)[0]
            loss = (found_N * torch.cat([found_N.new_zeros(0), *(self.weights[index] for index in indices)])).sum()
            loss.backward()
            total += loss.item()
            logprobs |= zip(indices, found_N.detach().split(list(batch.num_completion_tokens)), strict=True)
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        return torch.cat([logprobs[index] for index in range(len(self.sequences))]), total, gradient


@pytest.fixture(scope="module")
def data():
    return Data()


@pytest.fixture(scope="module")
def alone(data):
    return data.run([[(index,)] for index in range(13)])


def assert_same(found, wanted):
    assert (found[0] - wanted[0]).abs().max() < TOLERANCE
    assert abs(found[1] - wanted[1]) < TOLERANCE * max(1.0, abs(wanted[1]))
    assert (found[2] - wanted[2]).norm() < TOLERANCE * wanted[2].norm()


def test_packed_sequences_are_as_each_alone(data, alone):
    assert alone[0].dtype == torch.float64
    assert_same(data.run([[(index,) for index in range(13)]]), alone)


def test_completions_that_share_a_prompt_are_as_each_alone(data, alone):
    assert_same(data.run([[(0, 1, 2, 3), (4, 5, 6, 7), (8, 9), (10, 11, 12)]]), alone)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_pieces_and_of_their_completions_does_not_matter(seed, data, alone):
    rng = np.random.default_rng(seed)
    groups = [rng.permutation(members).tolist() for members in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11, 12])]
    pieces = [groups[number] for number in rng.permutation(4)]
    assert_same(data.run([pieces[:1], pieces[1:]]), alone)


def test_padded_rows_are_as_each_alone(data, alone):
    assert_same(
        data.run([[(index,) for index in range(6)], [(index,) for index in range(6, 13)]], is_padded=True), alone
    )


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize(("packing", "shares_prompts"), [("packed", True), ("packed", False), ("buckets", False)])
def test_no_plan_changes_anything(packing, shares_prompts, num_ranks, data, alone):
    pieces, plan = plan_step(
        data.prompts, data.lengths, data.groups, num_ranks=num_ranks, max_tokens=80, packing=packing,
        shares_prompts=shares_prompts, work=policy().work,
    )  # fmt: skip
    micro_batches = [[pieces[number].members for number in numbers] for rank in plan.micro_batches for numbers in rank]
    assert_same(data.run(micro_batches, is_padded=plan.is_padded), alone)
