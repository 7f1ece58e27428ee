"""One pass against two: the loss, its gradients and what is measured beside them must be the same numbers."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from towline.trainer.fused_loss import differentiated, fused_token_loss
from towline.trainer.head import PLAIN, HeadTransform
from towline.trainer.logprobs import token_logprobs, token_logprobs_and_entropy
from towline.trainer.losses import policy_loss

EXACT = [(torch.float64, 1e-12), (torch.float32, 1e-6)]


def inputs(num_tokens=23, dim=6, vocab=17, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    sizes = ((num_tokens, dim), (vocab, dim), (vocab,))
    leaves = [torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]
    return *leaves, torch.randint(0, vocab, (num_tokens,), generator=generator)


def grpo_loss(hidden_TD, weight_VD, bias_V, targets_T, **options):
    """Of some tokens of an older policy, of which clips and weights of 0 leave some out; with a KL penalty."""
    with torch.no_grad():
        own_T = token_logprobs(hidden_TD, weight_VD, targets_T, head_bias_V=bias_V, **options)
    generator = torch.Generator().manual_seed(1)
    noise_T, reference_noise_T, advantages_T, weights_T = torch.randn(
        4, len(own_T), generator=generator, dtype=torch.float64
    ).to(own_T.dtype)
    weights_T = weights_T.clamp(min=0) / 10

    def loss(logprobs_C, tokens):
        return policy_loss(
            logprobs_C,
            (own_T + 0.3 * noise_T)[tokens],
            advantages_T[tokens],
            weights_T[tokens],
            reference_logprobs_T=(own_T + 0.3 * reference_noise_T)[tokens],
            kl_beta=0.1,
        ).loss

    return loss


def assert_equal(found, wanted, relative):
    for found_one, wanted_one in zip(found, wanted, strict=True):
        assert found_one.dtype == wanted_one.dtype
        assert (found_one - wanted_one).abs().max() <= relative * wanted_one.abs().max()


def test_cross_entropy_of_two_equal_logits():
    hidden_TD = torch.ones(1, 1, requires_grad=True)
    weight_VD = torch.ones(2, 1, requires_grad=True)
    loss, logprobs_T, _ = fused_token_loss(
        hidden_TD, weight_VD, torch.tensor([1]), lambda logprobs_C, tokens: (-logprobs_C, -torch.ones_like(logprobs_C))
    )
    loss.backward()
    assert loss.item() == pytest.approx(0.693147)
    assert logprobs_T.tolist() == pytest.approx([-0.693147])
    assert weight_VD.grad.flatten().tolist() == [0.5, -0.5]
    assert hidden_TD.grad.item() == 0


@pytest.mark.parametrize("transform", [PLAIN, HeadTransform(multiplier=1.5), HeadTransform(multiplier=2, softcap=3.0)])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 512])
@pytest.mark.parametrize(("dtype", "relative"), EXACT)
def test_grpo_in_one_pass_equals_two_passes(dtype, relative, chunk_tokens, transform):
    hidden_TD, weight_VD, bias_V, targets_T = inputs(dtype=dtype)
    leaves = (hidden_TD, weight_VD, bias_V)
    options = {"temperature": 0.7, "transform": transform}
    grpo = grpo_loss(*leaves, targets_T, **options)
    options |= {"head_bias_V": bias_V, "chunk_tokens": chunk_tokens}
    logprobs_T, entropy_T = token_logprobs_and_entropy(hidden_TD, weight_VD, targets_T, **options)
    wanted = grpo(logprobs_T, slice(None))
    found, *measured = fused_token_loss(
        hidden_TD, weight_VD, targets_T, differentiated(grpo), with_entropy=True, **options
    )
    assert_equal([found, *measured], [wanted, logprobs_T, entropy_T], relative)
    assert not any(value_T.requires_grad for value_T in measured)
    # As an engine does that multiplies the loss.
    assert_equal(torch.autograd.grad(3 * found, leaves), torch.autograd.grad(3 * wanted, leaves), relative)


def test_bf16_gradients_are_those_of_two_passes():
    hidden_TD, weight_VD, bias_V, targets_T = inputs(num_tokens=64, dtype=torch.bfloat16)
    leaves = (hidden_TD, weight_VD, bias_V)
    grpo = grpo_loss(*leaves, targets_T)
    options = {"head_bias_V": bias_V, "chunk_tokens": 16}
    wanted = grpo(token_logprobs(hidden_TD, weight_VD, targets_T, **options), slice(None))
    found, *_ = fused_token_loss(hidden_TD, weight_VD, targets_T, differentiated(grpo), **options)
    assert found.dtype == torch.float32
    assert_equal(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), 1e-2)


def test_entropy_is_left_out_unless_asked_for():
    hidden_TD, weight_VD, _, targets_T = inputs()
    loss = differentiated(lambda logprobs_C, tokens: -logprobs_C)
    assert fused_token_loss(hidden_TD, weight_VD, targets_T, loss)[2].shape == (0,)


def test_logits_are_computed_once_and_never_held_for_all_tokens():
    hidden_TD, weight_VD, _, targets_T = inputs(num_tokens=256, dim=8, vocab=64, dtype=torch.float32)
    shapes = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            is_product = function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            shapes.extend((is_product, tuple(leaf.shape)) for leaf in tree_leaves(result) if torch.is_tensor(leaf))
            return result

    with Shapes():
        loss = differentiated(lambda logprobs_C, tokens: -logprobs_C)
        fused_token_loss(hidden_TD, weight_VD, targets_T, loss, chunk_tokens=32)[0].backward()
    assert shapes.count((True, (32, 64))) == 8
    assert max(torch.Size(shape).numel() for _, shape in shapes) == max(32 * 64, 256 * 8)


def test_saved_for_backward_are_the_gradients_alone():
    hidden_TD, weight_VD, bias_V, targets_T = inputs()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        loss = differentiated(lambda logprobs_C, tokens: -logprobs_C)
        fused_token_loss(hidden_TD, weight_VD, targets_T, loss, head_bias_V=bias_V)
    assert [tuple(tensor.shape) for tensor in saved] == [(23, 6), (17, 6), (17,)]
    inputs_at = {tensor.data_ptr() for tensor in (hidden_TD, weight_VD, bias_V)}
    assert not inputs_at & {tensor.data_ptr() for tensor in saved}


def test_without_gradients_none_is_computed():
    hidden_TD, weight_VD, _, targets_T = inputs(num_tokens=5)
    products = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            products.append(function) if "mm" in str(function) else None
            return function(*args, **(kwargs or {}))

    with torch.no_grad(), Products():
        loss, logprobs_T, _ = fused_token_loss(
            hidden_TD, weight_VD, targets_T, differentiated(lambda logprobs_C, tokens: -logprobs_C)
        )
    assert len(products) == 1
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(-logprobs_T.sum().item())


def test_a_frozen_head_gets_no_gradient():
    hidden_TD, weight_VD, _, targets_T = inputs()
    weight_VD.requires_grad_(False)
    loss = differentiated(lambda logprobs_C, tokens: -logprobs_C)
    fused_token_loss(hidden_TD, weight_VD, targets_T, loss)[0].backward()
    assert weight_VD.grad is None
    assert hidden_TD.grad.abs().sum() > 0


def test_no_tokens_give_zero_gradients():
    hidden_TD, weight_VD, bias_V, targets_T = inputs(num_tokens=0)
    loss, logprobs_T, _ = fused_token_loss(
        hidden_TD, weight_VD, targets_T, differentiated(lambda logprobs_C, tokens: -logprobs_C), head_bias_V=bias_V
    )
    loss.backward()
    assert (loss.item(), logprobs_T.shape) == (0, (0,))
    assert [leaf.grad.abs().sum().item() for leaf in (hidden_TD, weight_VD, bias_V)] == [0, 0, 0]


def test_a_second_backward_is_an_error_not_a_wrong_gradient():
    hidden_TD, weight_VD, _, targets_T = inputs()
    loss = fused_token_loss(hidden_TD, weight_VD, targets_T, differentiated(lambda logprobs_C, tokens: -logprobs_C))[0]
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_nan_log_prob_reaches_the_loss():
    hidden_TD, weight_VD, _, targets_T = inputs(num_tokens=3)
    hidden_TD = hidden_TD.detach().index_fill(0, torch.tensor([1]), float("nan"))
    loss, logprobs_T, _ = fused_token_loss(
        hidden_TD, weight_VD, targets_T, differentiated(lambda logprobs_C, tokens: -logprobs_C)
    )
    assert loss.isnan()
    assert logprobs_T.isnan().tolist() == [False, True, False]


def test_a_float32_head_may_meet_bf16_states():
    hidden_TD, weight_VD, _, targets_T = inputs(dtype=torch.float32)
    low_TD = hidden_TD.detach().bfloat16().requires_grad_()
    loss = differentiated(lambda logprobs_C, tokens: -logprobs_C)
    fused_token_loss(low_TD, weight_VD, targets_T, loss)[0].backward()
    assert (low_TD.grad.dtype, weight_VD.grad.dtype) == (torch.bfloat16, torch.float32)


# --- smoothed labels ---------------------------------------------------------------------------------------------


def smoothed(hidden_TD, weight_VD, targets_T, smoothing, **options):
    """The cross entropy with smoothed labels, summed."""
    return fused_token_loss(
        hidden_TD, weight_VD, targets_T, differentiated(lambda logprobs_C, tokens: -logprobs_C),
        label_smoothing=smoothing, **options,
    )  # fmt: skip


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("chunk_tokens", [7, 512])
@pytest.mark.parametrize(("dtype", "relative"), EXACT)
def test_smoothed_labels_are_those_of_torch(dtype, relative, chunk_tokens, smoothing):
    hidden_TD, weight_VD, bias_V, targets_T = inputs(dtype=dtype)
    leaves = (hidden_TD, weight_VD, bias_V)
    logits_TV = torch.nn.functional.linear(hidden_TD, weight_VD, bias_V) / 0.7
    wanted = torch.nn.functional.cross_entropy(logits_TV, targets_T, label_smoothing=smoothing, reduction="sum")
    options = {"head_bias_V": bias_V, "chunk_tokens": chunk_tokens, "temperature": 0.7}
    found = smoothed(hidden_TD, weight_VD, targets_T, smoothing, **options)[0]
    assert_equal([found], [wanted], relative)
    assert_equal(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), 3 * relative)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_smoothed_labels_go_through_cap_and_multiplier(with_entropy):
    hidden_TD, weight_VD, bias_V, targets_T = inputs()
    leaves = (hidden_TD, weight_VD, bias_V)
    logits_TV = 2 * torch.tanh(1.5 * torch.nn.functional.linear(hidden_TD, weight_VD, bias_V) / 2)
    wanted = torch.nn.functional.cross_entropy(logits_TV, targets_T, label_smoothing=0.2, reduction="sum")
    options = {"head_bias_V": bias_V, "transform": HeadTransform(multiplier=1.5, softcap=2.0), "chunk_tokens": 7}
    found = smoothed(hidden_TD, weight_VD, targets_T, 0.2, with_entropy=with_entropy, **options)[0]
    assert_equal([found], [wanted], 1e-12)
    assert_equal(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves), 1e-12)


def test_what_is_measured_beside_smoothed_labels_is_not_smoothed():
    hidden_TD, weight_VD, _, targets_T = inputs()
    plain, with_smoothing = (
        smoothed(hidden_TD, weight_VD, targets_T, smoothing, with_entropy=True) for smoothing in (0.0, 0.3)
    )
    assert with_smoothing[0] > plain[0]
    assert_equal(with_smoothing[1:], plain[1:], 1e-15)


def test_smoothed_labels_need_no_second_buffer_of_a_chunk():
    hidden_TD, weight_VD, _, targets_T = inputs(num_tokens=8, dim=6, vocab=64)
    buffers = []

    class Buffers(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            is_new = torch.is_tensor(result) and result.shape == (8, 64) and not function._schema.name.endswith("_")
            buffers.append(function) if is_new else None
            return result

    with Buffers():
        smoothed(hidden_TD, weight_VD, targets_T, 0.1)
    assert len(buffers) == 1


# --- groups ------------------------------------------------------------------------------------------------------

GROUPS = [4, 1, 9, 2, 7]


def group_loss(logprobs_C, sizes):
    """Not a sum over tokens: of each group the square of its sum."""
    return torch.stack([part.sum() ** 2 for part in logprobs_C.split(sizes)]).sum()


@pytest.mark.parametrize("transform", [PLAIN, HeadTransform(multiplier=2, softcap=3.0)])
@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 8, 23, 512])
@pytest.mark.parametrize(("dtype", "relative"), EXACT)
def test_a_loss_of_groups_is_that_of_two_passes_however_long_a_chunk_is(dtype, relative, chunk_tokens, transform):
    *leaves, targets_T = inputs(dtype=dtype)
    hidden_TD, weight_VD, bias_V = leaves
    ends = torch.tensor([0, *GROUPS]).cumsum(0).tolist()
    seen = []

    def loss(logprobs_C, tokens):
        seen.append(tokens)
        return group_loss(logprobs_C, GROUPS[ends.index(tokens.start) : ends.index(tokens.stop)])

    options = {"head_bias_V": bias_V, "transform": transform, "chunk_tokens": chunk_tokens}
    total, logprobs_T, _ = fused_token_loss(
        hidden_TD, weight_VD, targets_T, differentiated(loss), groups=GROUPS, **options
    )
    wanted_T = token_logprobs(hidden_TD, weight_VD, targets_T, **options)
    wanted = group_loss(wanted_T, GROUPS)
    assert_equal([total, logprobs_T], [wanted, wanted_T], relative)
    assert_equal(torch.autograd.grad(total, leaves), torch.autograd.grad(wanted, leaves), 10 * relative)
    assert [part.start for part in seen] == [0, *(part.stop for part in seen[:-1])]
    assert all(part.stop - part.start <= max(chunk_tokens, *GROUPS) for part in seen)


def test_smoothed_labels_and_entropies_of_a_group_longer_than_a_chunk():
    *leaves, targets_T = inputs()
    hidden_TD, weight_VD, _ = leaves

    def found(chunk_tokens):
        results = fused_token_loss(
            hidden_TD, weight_VD, targets_T, differentiated(lambda logprobs_C, _: logprobs_C.sum() ** 2),
            groups=[23], chunk_tokens=chunk_tokens, label_smoothing=0.1, with_entropy=True,
        )  # fmt: skip
        return *results, *torch.autograd.grad(results[0], leaves[:2])

    assert_equal(found(5), found(512), 1e-12)


def test_the_logits_of_groups_that_fit_into_a_chunk_are_computed_once():
    hidden_TD, weight_VD, _, targets_T = inputs()
    products = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and result.shape[-1] == len(weight_VD):
                products.append(len(result))
            return result

    def count(chunk_tokens):
        products.clear()
        loss = differentiated(lambda logprobs_C, _: logprobs_C.sum() ** 2)
        with Count():
            fused_token_loss(hidden_TD, weight_VD, targets_T, loss, groups=GROUPS, chunk_tokens=chunk_tokens)
        return list(products)

    assert count(10) == [5, 9, 9]  # 4 + 1, 9, 2 + 7
    assert count(5) == [5, 5, 4, 5, 2, 5, 2, 5]  # 9 as 5 and 4, then the 5 again; 2; 7 as 5 and 2, the 5 again
