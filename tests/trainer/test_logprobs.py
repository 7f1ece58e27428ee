import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from towline.trainer.logprobs import token_logprobs, token_logprobs_and_entropy
from towline.trainer.losses import mismatch, policy_loss
from towline.trainer.tripwires import MISMATCH_K3


def inputs(num_tokens=11, dim=6, vocab=17, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64)
    weight_VD = torch.randn(vocab, dim, generator=generator, dtype=torch.float64)
    bias_V = torch.randn(vocab, generator=generator, dtype=torch.float64)
    targets_T = torch.randint(0, vocab, (num_tokens,), generator=generator)
    leaves = [tensor.to(dtype).requires_grad_() for tensor in (hidden_TD, weight_VD, bias_V)]
    return *leaves, targets_T


def full_logprobs(hidden_TD, weight_VD, bias_V, targets_T, temperature):
    logits_TV = torch.nn.functional.linear(hidden_TD, weight_VD, bias_V).to(hidden_TD.dtype) / temperature
    return torch.log_softmax(logits_TV, -1).gather(-1, targets_T[:, None])[:, 0]


def test_two_equal_logits_give_log_one_half():
    logprobs = token_logprobs(torch.ones(1, 2), torch.ones(2, 2), torch.tensor([1]))
    assert logprobs.item() == pytest.approx(-0.693147)
    assert logprobs.dtype == torch.float32


@pytest.mark.parametrize("chunk_tokens", [1, 4, 11, 512])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("has_bias", [False, True])
def test_value_and_gradients_equal_log_softmax(chunk_tokens, temperature, has_bias):
    hidden_TD, weight_VD, bias_V, targets_T = inputs()
    bias_V = bias_V if has_bias else None
    found_T = token_logprobs(
        hidden_TD, weight_VD, targets_T, temperature=temperature, chunk_tokens=chunk_tokens, head_bias_V=bias_V
    )
    wanted_T = full_logprobs(hidden_TD, weight_VD, bias_V, targets_T, temperature)
    torch.testing.assert_close(found_T, wanted_T)
    upstream_T = torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [leaf for leaf in (hidden_TD, weight_VD, bias_V) if leaf is not None]
    found, wanted = (torch.autograd.grad(value_T, leaves, upstream_T) for value_T in (found_T, wanted_T))
    torch.testing.assert_close(found, wanted)


def test_the_temperature_divides_the_logits_before_they_are_compared():
    # G3-14: two logits 2 and 0; the head is the identity
    def logprob(temperature):
        return token_logprobs(
            torch.tensor([[2.0, 0.0]]), torch.eye(2), torch.tensor([0]), temperature=temperature
        )  # fmt: skip

    assert logprob(0.5).item() == pytest.approx(-0.01815, abs=1e-6)
    assert logprob(1.0).item() == pytest.approx(-0.126928, abs=1e-6)
    sums = policy_loss(logprob(0.5), logprob(0.5), torch.ones(1), torch.ones(1)).sums
    assert sums["ratio"].item() == 1
    # An engine that gives the log-prob of temperature 1: the ratio of a policy that has not moved is not 1.
    wrong = policy_loss(logprob(0.5), logprob(1.0), torch.ones(1), torch.ones(1)).sums
    assert wrong["ratio"].item() == pytest.approx(1.114915, abs=1e-5)
    distance, _ = mismatch(logprob(0.5), logprob(1.0), torch.ones(1, dtype=torch.bool))
    assert distance.item() > 10 * MISMATCH_K3["float32"]


def test_gradcheck():
    hidden_TD, weight_VD, bias_V, targets_T = inputs(num_tokens=5, dim=3, vocab=7)

    def function(hidden_TD, weight_VD, bias_V):
        return token_logprobs(hidden_TD, weight_VD, targets_T, temperature=0.8, chunk_tokens=2, head_bias_V=bias_V)

    assert torch.autograd.gradcheck(function, (hidden_TD, weight_VD, bias_V))


def test_a_loss_that_mixes_tokens_gets_its_gradient():
    # a sequence-level ratio, as in GSPO
    hidden_TD, weight_VD, _, targets_T = inputs()
    losses = [
        torch.exp(logprobs_T.mean() + 2).square()
        for logprobs_T in (
            token_logprobs(hidden_TD, weight_VD, targets_T, chunk_tokens=3),
            full_logprobs(hidden_TD, weight_VD, None, targets_T, 1.0),
        )
    ]
    found, wanted = (torch.autograd.grad(loss, (hidden_TD, weight_VD)) for loss in losses)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("dtype", "rel"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_low_precision_is_near_float64_of_the_same_inputs(dtype, rel):
    hidden_TD, weight_VD, bias_V, targets_T = inputs(num_tokens=64, dim=32, vocab=128, dtype=dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden_TD, weight_VD, bias_V)]
    found_T = token_logprobs(hidden_TD, weight_VD, targets_T, chunk_tokens=16, head_bias_V=bias_V)
    wanted_T = full_logprobs(*exact, targets_T, 1.0)
    assert found_T.dtype == torch.float32
    assert (found_T - wanted_T).abs().max() < rel * wanted_T.abs().max()
    found_T.square().sum().backward()
    wanted_T.square().sum().backward()
    for low, high in zip((hidden_TD, weight_VD, bias_V), exact, strict=True):
        assert low.grad.dtype == dtype
        assert (low.grad - high.grad).abs().max() < rel * high.grad.abs().max()


def test_many_small_chunks_add_up_in_bf16():
    # each chunk alone is below the last bit of the sum so far
    hidden_TD = torch.ones(512, 1, dtype=torch.bfloat16)
    weight_VD = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    token_logprobs(hidden_TD, weight_VD, torch.zeros(512, dtype=torch.int64), chunk_tokens=1).sum().backward()
    assert weight_VD.grad.flatten().tolist() == [256, -256]


def test_chunk_size_moves_bf16_logprobs_by_rounding_only():
    # G3-46
    hidden_TD, weight_VD, _, targets_T = inputs(num_tokens=64, dim=32, vocab=128, dtype=torch.bfloat16)
    one, eight = (token_logprobs(hidden_TD, weight_VD, targets_T, chunk_tokens=size) for size in (1, 8))
    log_ratio = (one - eight).detach()
    assert log_ratio.mean().abs() < 0.005
    outside = (log_ratio.exp() < 0.9) | (log_ratio.exp() > 1.1)
    assert outside.float().mean() < 0.08


class LargestTensor(TorchDispatchMode):
    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(result) if torch.is_tensor(leaf))])
        return result


def test_the_logits_of_all_tokens_are_never_held():
    hidden_TD, weight_VD, _, targets_T = inputs(num_tokens=256, dim=8, vocab=64, dtype=torch.float32)
    with LargestTensor() as largest:
        token_logprobs(hidden_TD, weight_VD, targets_T, chunk_tokens=32).sum().backward()
    assert largest.numel == max(32 * 64, 256 * 8)


def test_saved_for_backward_is_one_number_a_token_besides_the_inputs():
    hidden_TD, weight_VD, _, targets_T = inputs(num_tokens=100)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        token_logprobs(hidden_TD, weight_VD, targets_T)
    own = [tensor for tensor in saved if tensor.data_ptr() not in (hidden_TD.data_ptr(), weight_VD.data_ptr())]
    assert sorted(tuple(tensor.shape) for tensor in own) == [(100,), (100,)]  # targets and log-sum-exp


def test_no_tokens_give_zero_gradients():
    hidden_TD, weight_VD, bias_V, targets_T = inputs(num_tokens=0)
    logprobs_T = token_logprobs(hidden_TD, weight_VD, targets_T, head_bias_V=bias_V)
    logprobs_T.sum().backward()
    assert logprobs_T.shape == (0,)
    assert [leaf.grad.abs().sum().item() for leaf in (hidden_TD, weight_VD, bias_V)] == [0, 0, 0]


def test_a_frozen_head_gets_no_gradient():
    hidden_TD, weight_VD, _, targets_T = inputs()
    weight_VD.requires_grad_(False)
    token_logprobs(hidden_TD, weight_VD, targets_T).sum().backward()
    assert weight_VD.grad is None
    assert hidden_TD.grad.abs().sum() > 0


def test_nan_in_a_hidden_state_stays_visible_at_its_token_alone():
    hidden_TD, weight_VD, _, targets_T = inputs(num_tokens=3)
    hidden_TD = hidden_TD.detach().index_fill(0, torch.tensor([1]), float("nan"))
    assert token_logprobs(hidden_TD, weight_VD, targets_T).isnan().tolist() == [False, True, False]


def test_autocast_gives_the_same_logits_in_backward_as_in_forward():
    hidden_TD, weight_VD, _, targets_T = inputs(dtype=torch.float32)
    plain_T = token_logprobs(hidden_TD, weight_VD, targets_T)
    plain = torch.autograd.grad(plain_T.sum(), (hidden_TD, weight_VD))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast_T = token_logprobs(hidden_TD, weight_VD, targets_T)
    torch.testing.assert_close(cast_T, plain_T)
    torch.testing.assert_close(torch.autograd.grad(cast_T.sum(), (hidden_TD, weight_VD)), plain)


def test_bf16_states_may_meet_a_float32_head():
    hidden_TD, weight_VD, _, targets_T = inputs(dtype=torch.float32)
    low_TD = hidden_TD.detach().bfloat16().requires_grad_()
    token_logprobs(low_TD, weight_VD, targets_T).sum().backward()
    assert (low_TD.grad.dtype, weight_VD.grad.dtype) == (torch.bfloat16, torch.float32)


def test_entropy_of_a_uniform_head_is_log_of_the_vocabulary():
    _, entropy_T = token_logprobs_and_entropy(torch.ones(3, 2), torch.zeros(8, 2), torch.zeros(3, dtype=torch.int64))
    torch.testing.assert_close(entropy_T, torch.full((3,), 8.0).log())


def test_entropy_is_exact_and_leaves_the_gradient_as_it_was():
    hidden_TD, weight_VD, bias_V, targets_T = inputs()
    options = {"temperature": 0.7, "chunk_tokens": 4, "head_bias_V": bias_V}
    logprobs_T, entropy_T = token_logprobs_and_entropy(hidden_TD, weight_VD, targets_T, **options)
    wanted = torch.distributions.Categorical(logits=torch.nn.functional.linear(hidden_TD, weight_VD, bias_V) / 0.7)
    torch.testing.assert_close(entropy_T, wanted.entropy().detach())
    assert not entropy_T.requires_grad
    plain_T = token_logprobs(hidden_TD, weight_VD, targets_T, **options)
    torch.testing.assert_close(logprobs_T, plain_T)
    found, wanted = (torch.autograd.grad(value.sum(), (hidden_TD, weight_VD)) for value in (logprobs_T, plain_T))
    torch.testing.assert_close(found, wanted)
