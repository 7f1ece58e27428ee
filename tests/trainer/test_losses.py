import math

import numpy as np
import pytest
import torch

from towline.trainer.kl import importance_ratio, kl_k2, kl_k3
from towline.trainer.losses import mismatch, policy_loss
from towline.trainer.normaliser import LossTotals, loss_totals, token_weights

NAN, INF = float("nan"), float("inf")
LN2 = math.log(2)


def tensor(*values, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def one_token(ratio, advantage, **options):
    policy = tensor(-1.0, grad=True)
    old = tensor(-1.0 - math.log(ratio))
    output = policy_loss(policy, old, tensor(advantage), tensor(1.0), **options)
    output.loss.backward()
    return output.loss.item(), policy.grad.item(), output.sums["clipped"].item()


# --- the clipped surrogate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.5, 1.0, -1.2, 0.0, 1),
        (0.5, 1.0, -0.5, -0.5, 0),
        (0.5, -1.0, 0.8, 0.0, 1),
        (1.5, -1.0, 1.5, 1.5, 0),
        (1.5, 0.0, 0.0, 0.0, 0),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, gradient, clipped):
    assert one_token(ratio, advantage) == pytest.approx((loss, gradient, clipped), abs=1e-12)


def test_clips_may_be_unequal():
    assert one_token(1.4, 1.0, clip_low=0.2, clip_high=0.5) == pytest.approx((-1.4, -1.4, 0))
    assert one_token(0.75, -1.0, clip_low=0.2, clip_high=0.5) == pytest.approx((0.8, 0.0, 1))
    assert one_token(0.75, -1.0, clip_low=0.3, clip_high=0.2) == pytest.approx((0.75, 0.75, 0))


@pytest.mark.parametrize("distance", [200.0, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_huge_log_ratio_stays_finite_in_float32(distance, advantage):
    policy = torch.tensor([-1.0], requires_grad=True)
    old = torch.tensor([-1.0 - distance])
    loss = policy_loss(policy, old, torch.tensor([advantage]), torch.ones(1)).loss
    loss.backward()
    assert loss.isfinite()
    assert policy.grad.isfinite().all()


def test_gradient_on_policy_is_that_of_reinforce_with_baseline():
    torch.manual_seed(0)
    logits_TV = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    tokens_T = torch.randint(0, 5, (7, 1))
    weights_T, rewards_T = torch.full((7,), 1 / 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    advantages_T = rewards_T - rewards_T.mean()
    logprobs_T = torch.log_softmax(logits_TV, -1).gather(1, tokens_T)[:, 0]
    grpo = torch.autograd.grad(
        policy_loss(logprobs_T, logprobs_T.detach(), advantages_T, weights_T).loss, logits_TV, retain_graph=True
    )[0]
    reinforce = torch.autograd.grad(-(weights_T * advantages_T * logprobs_T).sum(), logits_TV)[0]
    torch.testing.assert_close(grpo, reinforce, rtol=1e-12, atol=1e-14)


def test_a_loss_of_zero_still_has_a_gradient():
    # G3-13: on policy, advantages that cancel, equal lengths
    policy = tensor(*[-LN2] * 6, grad=True)
    output = policy_loss(policy, policy, tensor(1, 1, 1, -1, -1, -1), tensor(*[1 / 6] * 6))
    output.loss.backward()
    assert output.loss.item() == 0
    torch.testing.assert_close(policy.grad, tensor(-1, -1, -1, 1, 1, 1) / 6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_gradcheck(estimator):
    torch.manual_seed(1)
    logits_TV = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    tokens_T = torch.randint(0, 5, (6, 1))
    old_T, reference_T = -torch.rand(2, 6, dtype=torch.float64) * 3
    advantages_T, weights_T = torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64)

    def loss(logits_TV):
        logprobs_T = torch.log_softmax(logits_TV, -1).gather(1, tokens_T)[:, 0]
        options = {"reference_logprobs_T": reference_T, "kl_beta": 0.3, "kl_estimator": estimator}
        return policy_loss(logprobs_T, old_T, advantages_T, weights_T, **options).loss

    assert torch.autograd.gradcheck(loss, (logits_TV,))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_only_the_policy_receives_a_gradient(estimator):
    policy, old, reference = (tensor(-1.0, -2.0 - shift, grad=True) for shift in (0, 0.1, 0.2))
    advantages, weights = tensor(1.0, -1.0, grad=True), tensor(0.5, 0.5, grad=True)
    policy_loss(
        policy, old, advantages, weights, reference_logprobs_T=reference, kl_beta=0.5, kl_estimator=estimator
    ).loss.backward()
    assert policy.grad.abs().min() > 0
    assert [other.grad for other in (old, reference, advantages, weights)] == [None] * 4


def test_the_sums_carry_no_graph():
    policy = tensor(-1.0, grad=True)
    output = policy_loss(policy, tensor(-1.0), tensor(1.0), tensor(1.0), reference_logprobs_T=tensor(-1.0))
    assert not any(value.requires_grad for value in output.sums.values())


def test_sums_by_hand_are_unweighted_and_skip_tokens_without_weight():
    policy = tensor(-1.0, -1.0, -1.0, -1.0)
    old = tensor(-1.0, -1.0 - math.log(1.5), -1.0 - LN2, -9.0)
    reference = tensor(-1.0, -1.0 + LN2, -1.0, 5.0)
    sums = policy_loss(
        policy, old, tensor(1, 1, -1, 1), tensor(0.01, 0.01, 0.02, 0), reference_logprobs_T=reference
    ).sums
    found = {name: value.item() for name, value in sums.items()}
    assert found == pytest.approx({"tokens": 3, "ratio": 1 + 1.5 + 2, "clipped": 1, "kl_k3": 1 - LN2})


def test_without_reference_there_is_no_kl_sum():
    assert set(policy_loss(*[tensor(-1.0)] * 4).sums) == {"tokens", "ratio", "clipped"}


def test_what_stands_at_a_token_without_weight_has_no_effect():
    for junk in (NAN, INF, -INF):
        policy = tensor(-1.0, junk, grad=True)
        output = policy_loss(
            policy,
            tensor(-1.2, junk),
            tensor(1.0, junk),
            tensor(1.0, 0.0),
            reference_logprobs_T=tensor(-1.1, junk),
            kl_beta=0.1,
        )
        output.loss.backward()
        assert output.loss.isfinite()
        assert policy.grad.isfinite().all()
        assert policy.grad[1] == 0
        assert all(value.isfinite() for value in output.sums.values())


@pytest.mark.parametrize("broken", range(6))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"surrogate": "cispo"},
        {"ratio_level": "sequence", "lengths": (1,)},
        {"kl_estimator": "k2"},
        {"kl_estimator": "k3_unbiased"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_nan_at_a_loss_token_stays_visible(broken, options):
    # G3-18
    values = [tensor(-1.0), tensor(-1.0), tensor(1.0), tensor(1.0), tensor(-1.0), tensor(1.0)]
    values[broken] = tensor(NAN)
    *positional, reference, correction = values
    loss = policy_loss(
        *positional, reference_logprobs_T=reference, correction_T=correction, kl_beta=0.1, **options
    ).loss  # fmt: skip
    assert loss.isnan()


def test_no_loss_token_gives_a_connected_zero():
    # G3-12
    for policy in (tensor(-1.0, -2.0, grad=True), torch.empty(0, requires_grad=True)):
        output = policy_loss(policy, policy - 1, torch.ones_like(policy), torch.zeros_like(policy))
        output.loss.backward()
        assert output.loss.item() == 0
        assert output.sums["tokens"].item() == 0
        torch.testing.assert_close(policy.grad, torch.zeros_like(policy))


def test_bf16_logprobs_are_computed_with_in_float32():
    policy, old, one = torch.tensor([[-1.0], [-1.0078125], [1.0]], dtype=torch.bfloat16)
    output = policy_loss(policy, old, one, torch.ones(1), clip_high=1.0)
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(-math.exp(1 / 128), rel=1e-6)


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(AssertionError, match=r"expected shape \(3,\), found \(3, 1\)"):
        policy_loss(torch.zeros(3), torch.zeros(3, 1), torch.zeros(3), torch.ones(3))
    with pytest.raises(AssertionError, match="one value for each token"):
        policy_loss(*[torch.zeros(3, 1)] * 4)


# --- KL ----------------------------------------------------------------------------------------------------------


def test_k3_and_k2_by_hand():
    sampled, other = tensor(-1.0, -1.693147, -1.0), tensor(-1.0, -1.0, -3.0)
    torch.testing.assert_close(kl_k3(sampled, other), tensor(0, 0.306853, math.exp(-2) + 1), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(kl_k2(sampled, other), tensor(0, 0.240227, 2), rtol=1e-5, atol=1e-12)


def test_k3_is_finite_at_a_large_log_ratio_with_its_gradient():
    # G3-17
    policy = torch.tensor([-200.0, -1.0, -1.693147], requires_grad=True)
    kl = kl_k3(policy, torch.tensor([0.0, -1.0, -1.0]))
    kl.sum().backward()
    assert kl.isfinite().all()
    assert policy.grad.isfinite().all()
    torch.testing.assert_close(kl[1:], torch.tensor([0.0, 0.306853]), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(policy.grad[1:], torch.tensor([0.0, -1.0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("distance", [200.0, -200.0])
@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_unbiased"])
def test_a_huge_kl_in_the_loss_stays_finite_in_float32_with_its_gradient(estimator, distance):
    # G3-17, either way round, and with a ratio that is as far off
    policy = torch.tensor([-201.0], requires_grad=True)
    for old in (-201.0, -1.0, -401.0):
        loss = policy_loss(
            policy, torch.tensor([old]), torch.ones(1), torch.ones(1),
            reference_logprobs_T=torch.tensor([-201.0 + distance]), kl_beta=0.04, kl_estimator=estimator,
        ).loss  # fmt: skip
        (gradient,) = torch.autograd.grad(loss, policy)
        assert loss.isfinite()
        assert gradient.isfinite().all()


def test_k3_still_pulls_back_a_policy_far_above_the_reference():
    policy = torch.tensor([-0.1], requires_grad=True)
    kl_k3(policy, torch.tensor([-60.0])).backward()
    assert policy.grad.item() == pytest.approx(1)


def test_k3_is_never_negative():
    d = torch.cat([torch.linspace(-25, 25, 20_001), torch.logspace(-8, 0, 1_001), -torch.logspace(-8, 0, 1_001)])
    assert kl_k3(torch.zeros_like(d), d).min() >= -1e-9
    assert kl_k3(torch.zeros_like(d).double(), d.double()).min() >= -1e-18


def test_k3_is_accurate_near_zero_in_float32():
    assert kl_k3(torch.zeros(1), torch.full((1,), 1e-3)).item() == pytest.approx(0.5e-6, rel=1e-3)


@pytest.fixture
def vocabulary():
    """(policy logits, log-probs of all five tokens, those of the reference)"""
    torch.manual_seed(2)
    logits_V = torch.randn(5, dtype=torch.float64, requires_grad=True)
    return logits_V, torch.log_softmax(logits_V, 0), torch.log_softmax(torch.randn(5, dtype=torch.float64), 0)


def reverse_kl(policy_V, reference_V):
    return (policy_V.exp() * (policy_V - reference_V)).sum()


def test_expected_k3_is_the_kl_in_value_and_in_full_gradient(vocabulary):
    logits_V, policy_V, reference_V = vocabulary
    expected, exact = (policy_V.exp() * kl_k3(policy_V, reference_V)).sum(), reverse_kl(policy_V, reference_V)
    torch.testing.assert_close(expected, exact)
    found, wanted = (torch.autograd.grad(value, logits_V, retain_graph=True)[0] for value in (expected, exact))
    torch.testing.assert_close(found, wanted)


def sampled_gradient(estimator, vocabulary):
    """Expectation of the gradient that a loss over sampled tokens has: the probabilities are weights, not a path."""
    logits_V, policy_V, reference_V = vocabulary
    loss = policy_loss(
        policy_V, policy_V, torch.zeros_like(policy_V), policy_V.exp(), reference_logprobs_T=reference_V, kl_beta=1.0,
        kl_estimator=estimator,
    ).loss  # fmt: skip
    return torch.autograd.grad(loss, logits_V, retain_graph=True)[0]


def test_expected_gradient_of_k2_is_that_of_the_reverse_kl(vocabulary):
    logits_V, policy_V, reference_V = vocabulary
    exact = torch.autograd.grad(reverse_kl(policy_V, reference_V), logits_V, retain_graph=True)[0]
    torch.testing.assert_close(sampled_gradient("k2", vocabulary), exact)


def test_expected_gradient_of_k3_is_that_of_the_forward_kl(vocabulary):
    logits_V, policy_V, reference_V = vocabulary
    exact = torch.autograd.grad(reverse_kl(reference_V, policy_V), logits_V, retain_graph=True)[0]
    torch.testing.assert_close(sampled_gradient("k3", vocabulary), exact)


def test_kl_enters_the_loss_with_beta():
    same = [tensor(-1.0), tensor(-1.0), tensor(0.0), tensor(1.0)]
    reference = tensor(-1.0 + LN2)
    loss_k3 = policy_loss(*same, reference_logprobs_T=reference, kl_beta=0.04).loss
    loss_k2 = policy_loss(*same, reference_logprobs_T=reference, kl_beta=0.04, kl_estimator="k2").loss
    assert loss_k3.item() == pytest.approx(0.04 * (1 - LN2))
    assert loss_k2.item() == pytest.approx(0.04 * LN2**2 / 2)


def test_beta_towards_zero_gives_the_loss_without_kl():
    arguments = [tensor(-1.0, -0.5), tensor(-1.1, -0.4), tensor(1.0, -2.0), tensor(0.5, 0.5)]
    plain = policy_loss(*arguments).loss
    for beta in (1e-6, 1e-9, 0.0):
        loss = policy_loss(*arguments, reference_logprobs_T=tensor(-3.0, -0.1), kl_beta=beta).loss
        assert abs(loss - plain) <= 10 * beta


def test_with_beta_zero_a_broken_reference_is_seen_in_the_sum_alone():
    output = policy_loss(*[tensor(-1.0)] * 4, reference_logprobs_T=tensor(NAN), kl_beta=0.0)
    assert output.loss.isfinite()
    assert output.sums["kl_k3"].isnan()


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_unbiased"])
def test_a_group_of_equal_rewards_has_the_gradient_of_its_kl_alone(estimator):
    # G3-01: exactly none with beta = 0
    policy, old, reference = tensor(-1.0, -0.5, grad=True), tensor(-1.2, -0.4), tensor(-1.5, -0.6)
    options = {"reference_logprobs_T": reference, "kl_estimator": estimator}
    loss = policy_loss(policy, old, tensor(0.0, 0.0), tensor(0.5, 0.5), **options).loss
    assert loss.item() == 0
    assert (torch.autograd.grad(loss, policy)[0] == 0).all()
    with_kl = policy_loss(policy, old, tensor(0.0, 0.0), tensor(0.5, 0.5), kl_beta=0.1, **options).loss
    assert (torch.autograd.grad(with_kl, policy)[0] > 0).all()


def test_beta_without_reference_is_refused():
    with pytest.raises(AssertionError, match="needs reference_logprobs_T"):
        policy_loss(*[tensor(-1.0)] * 4, kl_beta=0.04)


# --- the normaliser ----------------------------------------------------------------------------------------------


def weighted_sum(weights):
    return float(sum(array.sum() for array in weights))


def test_token_normaliser_divides_by_all_tokens_of_the_step():
    weights = token_weights([4, 2], "tokens", totals=LossTotals(tokens=10, completions=3))
    assert [len(array) for array in weights] == [4, 2]
    np.testing.assert_allclose(np.concatenate(weights), np.full(6, 0.1), rtol=1e-6)
    assert weights[0].dtype == np.float32


def test_sequence_normaliser_counts_completions_alike():
    weights = token_weights([4, 2], "sequence", totals=LossTotals(tokens=6, completions=2))
    np.testing.assert_allclose(np.concatenate(weights), [1 / 8] * 4 + [1 / 4] * 2, rtol=1e-6)


def test_constant_normaliser_ignores_lengths():
    weights = token_weights([4, 2], "constant", totals=LossTotals(tokens=6, completions=2), constant=50)
    np.testing.assert_allclose(np.concatenate(weights), [0.02] * 6, rtol=1e-6)


@pytest.mark.parametrize(("normaliser", "constant"), [("constant", None), ("tokens", 5.0)])
def test_constant_belongs_to_its_normaliser(normaliser, constant):
    with pytest.raises(AssertionError, match="belongs to"):
        token_weights([1], normaliser, totals=LossTotals(tokens=1, completions=1), constant=constant)


@pytest.mark.parametrize("normaliser", ["tokens", "sequence"])
def test_masked_completions_are_in_no_denominator(normaliser):
    # G3-08: loss 1 for every token; the truncated completion of 4 is masked
    lengths, masked = [4, 2], [True, False]
    totals = loss_totals(lengths, masked=masked)
    assert totals == LossTotals(tokens=2, completions=1)
    weights = token_weights(lengths, normaliser, totals=totals, masked=masked)
    assert weighted_sum(weights) == 1.0
    assert not weights[0].any()


@pytest.mark.parametrize("normaliser", ["tokens", "sequence"])
def test_all_masked_gives_zero_not_nan(normaliser):
    masked = [True, True]
    weights = token_weights([4, 2], normaliser, totals=loss_totals([4, 2], masked=masked), masked=masked)
    assert weighted_sum(weights) == 0.0


def test_a_completion_without_tokens_is_not_counted():
    assert loss_totals([3, 0]) == LossTotals(tokens=3, completions=1)
    weights = token_weights([3, 0], "sequence", totals=loss_totals([3, 0]))
    assert [len(array) for array in weights] == [3, 0]
    assert weighted_sum(weights) == pytest.approx(1)


@pytest.mark.parametrize("normaliser", ["tokens", "sequence"])
def test_one_denominator_over_ranks_and_micro_batches(normaliser):
    split = [[[5, 1], [7]], [[2, 2, 2], []]]  # [rank][micro-batch]
    counts = [loss_totals(lengths) for rank in split for lengths in rank]
    totals = LossTotals(tokens=sum(c.tokens for c in counts), completions=sum(c.completions for c in counts))
    whole = np.concatenate(token_weights([5, 1, 7, 2, 2, 2], normaliser, totals=totals))
    parts = [array for rank in split for lengths in rank for array in token_weights(lengths, normaliser, totals=totals)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert weighted_sum(parts) == pytest.approx(1, rel=1e-6)


def test_a_rank_without_loss_tokens_adds_nothing():
    # G3-12: sums 0 and 10 over 0 and 5 tokens make 2, not NaN and not the mean of means
    totals = LossTotals(tokens=0 + 5, completions=1)
    empty = policy_loss(*[torch.empty(0)] * 4).loss
    weights_T = torch.from_numpy(token_weights([5], "tokens", totals=totals)[0])
    full = policy_loss(torch.zeros(5), torch.zeros(5), torch.full((5,), -2.0), weights_T).loss
    assert (empty + full).item() == pytest.approx(2.0)


def test_four_micro_batches_equal_one():
    torch.manual_seed(3)
    lengths = [1, 6, 2, 4, 3, 5, 2, 1]
    weights_T = torch.from_numpy(np.concatenate(token_weights(lengths, "tokens", totals=loss_totals(lengths)))).double()
    base_T, noise_T, advantages_T, shift_T = torch.randn(4, 24, dtype=torch.float64)
    parameter = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)

    def run(tokens):
        policy_T = -torch.exp(parameter * base_T[tokens])
        return policy_loss(
            policy_T, policy_T.detach() + 0.2 * noise_T[tokens], advantages_T[tokens], weights_T[tokens],
            reference_logprobs_T=policy_T.detach() + 0.3 * shift_T[tokens], kl_beta=0.1,
        )  # fmt: skip

    whole = run(slice(None))
    parts = [run(slice(start, end)) for start, end in ((0, 7), (7, 13), (13, 21), (21, 24))]
    total = sum(part.loss for part in parts)
    torch.testing.assert_close(total, whole.loss)
    for name, value in whole.sums.items():
        torch.testing.assert_close(sum(part.sums[name] for part in parts), value)
    gradients = [torch.autograd.grad(loss, parameter)[0] for loss in (total, whole.loss)]
    torch.testing.assert_close(*gradients)


# --- engine mismatch ---------------------------------------------------------------------------------------------


def test_mismatch_by_hand():
    policy, rollout = tensor(-1.0, -1.0 + LN2, -1.5, -7.0), tensor(-1.0, -1.0, -1.0, -1.0)
    total, largest = mismatch(policy, rollout, torch.tensor([True, True, True, False]))
    assert total.item() == pytest.approx((2 - 1 - LN2) + (math.exp(-0.5) + 0.5 - 1))
    assert largest.item() == pytest.approx(LN2)


def test_expected_mismatch_is_the_kl_from_rollout_to_policy():
    torch.manual_seed(4)
    policy_V, rollout_V = torch.log_softmax(torch.randn(2, 5, dtype=torch.float64), 1)
    mask = torch.ones(1, dtype=torch.bool)
    expected = sum(rollout_V[v].exp() * mismatch(policy_V[v : v + 1], rollout_V[v : v + 1], mask)[0] for v in range(5))
    torch.testing.assert_close(expected, reverse_kl(rollout_V, policy_V))


def test_mismatch_shows_nan_within_the_mask_only():
    policy, rollout = tensor(-1.0, NAN), tensor(-1.0, -1.0)
    assert all(value.isnan() for value in mismatch(policy, rollout, torch.tensor([True, True])))
    assert [value.item() for value in mismatch(policy, rollout, torch.tensor([True, False]))] == [0, 0]


def test_mismatch_of_nothing_is_zero():
    empty = torch.empty(0)
    assert [value.item() for value in mismatch(empty, empty, empty.bool())] == [0, 0]


def test_ratio_is_one_on_policy():
    assert importance_ratio(tensor(-3.0), tensor(-3.0)).item() == 1
