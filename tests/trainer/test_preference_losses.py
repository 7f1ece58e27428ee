import math

import pytest
import torch

from towline.trainer.preference_losses import completion_logprobs, preference_loss

LN2 = math.log(2)


def tensor(*values, grad=False, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, requires_grad=grad)


def of_delta(delta_P, *, beta=0.1, **options):
    """The loss of pairs whose chosen completion has gained `delta_P` and whose rejected one nothing."""
    zeros_P = torch.zeros_like(delta_P)
    return preference_loss(delta_P - 3.0, zeros_P - 5.0, zeros_P - 3.0, zeros_P - 5.0, beta=beta, **options).losses_P


def slope(delta, **options):
    leaf = tensor(delta, grad=True)
    return torch.autograd.grad(of_delta(leaf, **options).sum(), leaf)[0].item()


# --- sigmoid -----------------------------------------------------------------------------------------------------


def test_dpo_by_hand():
    """beta = 1/2; log-ratios: chosen -1 - -3 = 2, rejected -4 - -2 = -2, so beta delta = 2."""
    output = preference_loss(tensor(-1.0), tensor(-4.0), tensor(-3.0), tensor(-2.0), beta=0.5)
    assert output.losses_P.tolist() == pytest.approx([math.log(1 + math.exp(-2))])
    assert (output.chosen_rewards_P.tolist(), output.rejected_rewards_P.tolist()) == ([1.0], [-1.0])


def test_the_gradient_is_that_of_equation_7():
    """-beta sigmoid(r_rejected - r_chosen), times +1 for the chosen and -1 for the rejected log-prob."""
    chosen, rejected = tensor(-1.0, -7.0, grad=True), tensor(-4.0, -2.0, grad=True)
    output = preference_loss(chosen, rejected, tensor(-3.0, -6.0), tensor(-2.0, -2.5), beta=0.5)
    output.losses_P.sum().backward()
    wrong = torch.sigmoid(output.rejected_rewards_P - output.chosen_rewards_P)
    torch.testing.assert_close(chosen.grad, -0.5 * wrong)
    torch.testing.assert_close(rejected.grad, 0.5 * wrong)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("beta", [0.05, 0.1, 3.0])
def test_at_the_reference_the_loss_is_ln_2_with_any_smoothing(beta, label_smoothing):
    """G3-30."""
    logprobs = tensor(-812.25, -3.5), tensor(-90.0, -441.125)
    output = preference_loss(*logprobs, *logprobs, beta=beta, label_smoothing=label_smoothing)
    torch.testing.assert_close(output.losses_P, tensor(LN2, LN2))
    assert (output.chosen_rewards_P - output.rejected_rewards_P).tolist() == [0.0, 0.0]


def test_label_smoothing_by_hand():
    """G3-31."""
    assert of_delta(tensor(1.0)).item() == pytest.approx(0.644397, abs=1e-6)
    assert of_delta(tensor(1.0), label_smoothing=0.1).item() == pytest.approx(0.654397, abs=1e-6)


@pytest.mark.parametrize("smoothing", [0.01, 0.1, 0.3, 0.5])
def test_a_smoothed_loss_has_one_minimum_where_the_pair_is_as_likely_right_as_said(smoothing):
    """sigmoid(beta delta) = 1 - smoothing: log((1 - s) / s) / beta, which for a half is 0."""
    best = math.log((1 - smoothing) / smoothing) / 0.1
    assert slope(best, label_smoothing=smoothing) == pytest.approx(0.0, abs=1e-15)
    assert slope(best - 1, label_smoothing=smoothing) < -1e-5
    assert slope(best + 1, label_smoothing=smoothing) > 1e-5


def test_half_a_smoothing_pulls_alike_to_both_sides():
    assert slope(0.0, label_smoothing=0.5) == 0.0
    assert slope(4.0, label_smoothing=0.5) == pytest.approx(-slope(-4.0, label_smoothing=0.5))


def test_smoothing_is_the_mean_over_the_two_ways_round():
    delta = tensor(-3.0, 0.5, 8.0)
    found = of_delta(delta, label_smoothing=0.2)
    torch.testing.assert_close(found, 0.8 * of_delta(delta) + 0.2 * of_delta(-delta))


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_a_pair_of_equal_completions_teaches_nothing(label_smoothing):
    """G3-32: whatever the policy, both gain the same."""
    policy = tensor(-2.0, grad=True)
    losses_P = preference_loss(
        policy, policy, tensor(-9.0), tensor(-9.0), beta=0.1, label_smoothing=label_smoothing
    ).losses_P
    losses_P.sum().backward()
    assert losses_P.item() == pytest.approx(LN2)
    assert policy.grad.item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_margins_of_ten_thousand_stay_finite(dtype, label_smoothing):
    delta = tensor(1e4, -1e4, grad=True, dtype=dtype)
    losses_P = of_delta(delta, beta=1.0, label_smoothing=label_smoothing)
    losses_P.sum().backward()
    wanted = [1e4 * label_smoothing, 1e4 * (1 - label_smoothing)]
    assert losses_P.tolist() == pytest.approx(wanted, rel=1e-6)
    assert delta.grad.tolist() == pytest.approx([label_smoothing, label_smoothing - 1], rel=1e-6)


# --- lengths and IPO ---------------------------------------------------------------------------------------------


def test_ipo_by_hand():
    """beta = 1/2: the target is 1."""
    assert of_delta(tensor(1.0, 3.0, -1.0), beta=0.5, kind="ipo").tolist() == pytest.approx([0.0, 4.0, 4.0])
    assert slope(5.0, beta=0.1, kind="ipo") == pytest.approx(0.0)


def test_ipo_divides_by_the_tokens_that_were_scored():
    """G3-29: of three chosen tokens two have a predecessor; each gained 1. Divided by three the loss would be 1/9."""
    output = preference_loss(
        tensor(-5.0), tensor(-4.0), tensor(-7.0), tensor(-4.0), beta=0.5, kind="ipo", is_length_normalised=True,
        chosen_tokens_P=torch.tensor([2]), rejected_tokens_P=torch.tensor([2]),
    )  # fmt: skip
    assert output.losses_P.item() == pytest.approx(0.0)
    assert (output.chosen_rewards_P - output.rejected_rewards_P).item() == pytest.approx(0.5 * 1.0)


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_lengths_divide_each_log_ratio_by_its_own(kind):
    policy, reference = (tensor(-8.0), tensor(-30.0)), (tensor(-12.0), tensor(-24.0))
    found = preference_loss(
        *policy, *reference, beta=0.3, kind=kind, is_length_normalised=True,
        chosen_tokens_P=torch.tensor([4]), rejected_tokens_P=torch.tensor([12]),
    )  # fmt: skip
    torch.testing.assert_close(found.losses_P, of_delta(tensor(4 / 4 - -6 / 12), beta=0.3, kind=kind))
    assert found.chosen_rewards_P.item() == pytest.approx(0.3)
    assert found.rejected_rewards_P.item() == pytest.approx(-0.15)


def test_a_length_of_one_changes_nothing():
    logprobs = [tensor(-1.0, -2.0), tensor(-3.0, -1.0), tensor(-1.5, -2.5), tensor(-2.0, -2.0)]
    ones = torch.ones(2, dtype=torch.int64)
    normalised = preference_loss(
        *logprobs, beta=0.2, is_length_normalised=True, chosen_tokens_P=ones, rejected_tokens_P=ones
    )
    torch.testing.assert_close(normalised.losses_P, preference_loss(*logprobs, beta=0.2).losses_P)


# --- gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_length_normalised", [False, True])
@pytest.mark.parametrize(("kind", "label_smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
def test_gradcheck(kind, label_smoothing, is_length_normalised):
    torch.manual_seed(0)
    chosen, rejected = (-5 * torch.rand(2, 4, dtype=torch.float64)).requires_grad_()
    reference = -5 * torch.rand(2, 4, dtype=torch.float64)

    def losses(chosen, rejected):
        return preference_loss(
            chosen, rejected, *reference, beta=0.4, kind=kind, label_smoothing=label_smoothing,
            is_length_normalised=is_length_normalised, chosen_tokens_P=torch.tensor([1, 2, 3, 4]),
            rejected_tokens_P=torch.tensor([5, 2, 1, 7]),
        ).losses_P  # fmt: skip

    assert torch.autograd.gradcheck(losses, (chosen, rejected))


def test_only_the_policy_receives_a_gradient():
    policy, reference = (
        (tensor(-1.0, grad=True), tensor(-2.0, grad=True)),
        (tensor(-3.0, grad=True), tensor(-1.0, grad=True)),
    )
    output = preference_loss(*policy, *reference, beta=0.1)
    output.losses_P.sum().backward()
    assert all(leaf.grad is not None for leaf in policy)
    assert all(leaf.grad is None for leaf in reference)
    assert not output.chosen_rewards_P.requires_grad
    assert not output.rejected_rewards_P.requires_grad


def test_no_pairs_give_a_loss_of_zero_that_is_connected():
    nothing = tensor(grad=True)
    output = preference_loss(nothing, nothing, tensor(), tensor(), beta=0.1)
    output.losses_P.sum().backward()
    assert nothing.grad.shape == (0,)


def test_what_is_not_finite_reaches_the_loss():
    delta = tensor(float("nan"), float("inf"), -float("inf"))
    assert of_delta(delta).tolist()[1:] == [0.0, math.inf]
    assert of_delta(delta)[0].isnan()


def test_bfloat16_is_computed_in_float32():
    values = [tensor(value, dtype=torch.bfloat16) for value in (-1.0, -4.0, -3.0, -2.0)]
    losses_P = preference_loss(*values, beta=0.5).losses_P
    assert losses_P.dtype is torch.float32
    assert losses_P.item() == pytest.approx(math.log(1 + math.exp(-2)), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, "expected > 0"),
        ({"beta": 0.1, "label_smoothing": 0.6}, "expected 0 to 1/2"),
        ({"beta": 0.1, "label_smoothing": 0.1, "kind": "ipo"}, "belongs to the kind"),
        ({"beta": 0.1, "is_length_normalised": True}, "needs the numbers of tokens"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message):
    with pytest.raises(AssertionError, match=message):
        preference_loss(*[tensor(-1.0)] * 4, **options)


# --- sums of log-probs -------------------------------------------------------------------------------------------


def test_log_probs_are_added_up_by_completion():
    logprobs_N = torch.tensor([-1.0, -2.0, -4.0, -8.0], requires_grad=True)
    sums_C = completion_logprobs(logprobs_N, (2, 0, 1, 1))
    assert (sums_C.dtype, sums_C.tolist()) == (torch.float64, [-3.0, 0.0, -4.0, -8.0])
    (sums_C * torch.arange(1, 5)).sum().backward()
    assert logprobs_N.grad.tolist() == [1.0, 1.0, 3.0, 4.0]


def test_no_completions_have_no_sums():
    assert completion_logprobs(torch.zeros(0), ()).shape == (0,)


def test_a_long_sum_keeps_what_float32_would_lose():
    logprobs_N = torch.full((100_000,), -0.1)
    assert completion_logprobs(logprobs_N, (100_000,)).item() == pytest.approx(
        100_000 * logprobs_N[0].item(), rel=1e-12
    )


def test_sums_of_other_tokens_are_refused():
    with pytest.raises(AssertionError, match="3 tokens in completions, 2 log-probs"):
        completion_logprobs(torch.zeros(2), (1, 2))


# --- with the likelihood of the chosen completion ----------------------------------------------------------------


def test_the_likelihood_of_the_chosen_completion_by_hand():
    """Half of -log p(chosen) a token, 12 nats over 4 tokens, on top of the loss; rejected ones have no part in it."""
    chosen, rejected = tensor(-12.0, grad=True), tensor(-5.0, grad=True)
    references = tensor(-12.0), tensor(-5.0)
    counts = {"chosen_tokens_P": tensor(4.0), "rejected_tokens_P": tensor(2.0)}
    alone = preference_loss(chosen, rejected, *references, beta=0.1, **counts)
    both = preference_loss(chosen, rejected, *references, beta=0.1, nll_weight=0.5, **counts)
    assert (both.losses_P - alone.losses_P).tolist() == pytest.approx([1.5])
    slopes = torch.autograd.grad(both.losses_P.sum() - alone.losses_P.sum(), (chosen, rejected))
    assert [slope.item() for slope in slopes] == pytest.approx([-0.125, 0.0])
    assert both.chosen_rewards_P.tolist() == alone.chosen_rewards_P.tolist()


def test_the_likelihood_needs_the_numbers_of_tokens():
    with pytest.raises(AssertionError, match="nll_weight needs the numbers of tokens"):
        preference_loss(*[tensor(-1.0)] * 4, beta=0.1, nll_weight=1.0)
