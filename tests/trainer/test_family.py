"""The members of the GRPO family: hand-worked values, and what each becomes where it must equal another. Float64."""

import math

import pytest
import torch

from towline.trainer.kl import kl_k1, kl_k3_unbiased
from towline.trainer.losses import engine_correction, mismatch, policy_loss, sequence_ratio
from towline.trainer.normaliser import loss_totals, token_weights

LENGTHS = (3, 1, 4, 2)
NUM_TOKENS = sum(LENGTHS)


@pytest.fixture
def policy():
    """Log-probs of a small policy that differ from those of the old one."""
    torch.manual_seed(1)
    return (-torch.rand(NUM_TOKENS, dtype=torch.float64) * 3).requires_grad_()


@pytest.fixture
def old(policy):
    torch.manual_seed(2)
    return policy.detach() + 0.3 * torch.randn(NUM_TOKENS, dtype=torch.float64)


@pytest.fixture
def advantages():
    torch.manual_seed(3)
    return torch.repeat_interleave(torch.randn(len(LENGTHS), dtype=torch.float64), torch.tensor(LENGTHS))


def weights(normaliser="tokens", lengths=LENGTHS):
    arrays = token_weights(lengths, normaliser, totals=loss_totals(lengths))
    return torch.cat([torch.from_numpy(array).double() for array in arrays])


def gradient(policy, *arguments, **options):
    (found,) = torch.autograd.grad(policy_loss(policy, *arguments, **options).loss, policy)
    return found


# --- GSPO --------------------------------------------------------------------------------------------------------


def test_sequence_ratio_by_hand():
    # completions of 2 and 1 tokens: mean log-ratios (0.4 - 0.2) / 2 = 0.1 and -0.5
    ratio = sequence_ratio(torch.tensor([-1.0, -2.0, -1.5]), torch.tensor([-1.4, -1.8, -1.0]), (2, 1))
    assert ratio.tolist() == pytest.approx([math.exp(0.1), math.exp(0.1), math.exp(-0.5)])


def test_gspo_by_hand():
    """One completion of two tokens, advantage 2, weights of the sequence normaliser: the loss is -ratio 2."""
    policy = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0002, -2.0002], dtype=torch.float64)
    output = policy_loss(
        policy, old, torch.full((2,), 2.0), weights("sequence", (2,)), ratio_level="sequence", lengths=(2,),
        clip_low=3e-4, clip_high=4e-4,
    )  # fmt: skip
    output.loss.backward()
    assert output.loss.item() == pytest.approx(-2 * math.exp(2e-4))
    # Each token carries half of the sequence's gradient.
    assert policy.grad.tolist() == pytest.approx([-math.exp(2e-4)] * 2)


@pytest.mark.parametrize(
    ("distance", "advantage", "gradient_is_zero"),
    [(5e-4, 1, True), (5e-4, -1, False), (-4e-4, -1, True), (-4e-4, 1, False)],
)
def test_gspo_clips_whole_completions(distance, advantage, gradient_is_zero):
    policy = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    found = gradient(
        policy, policy.detach() - distance, torch.full((2,), float(advantage)), weights("sequence", (2,)),
        ratio_level="sequence", lengths=(2,), clip_low=3e-4, clip_high=4e-4,
    )  # fmt: skip
    assert (found == 0).all() == gradient_is_zero


def test_gspo_with_completions_of_one_token_is_grpo(policy, old, advantages):
    lengths = (1,) * NUM_TOKENS
    of_one = weights("sequence", lengths)
    gspo = gradient(policy, old, advantages, of_one, ratio_level="sequence", lengths=lengths)
    torch.testing.assert_close(gspo, gradient(policy, old, advantages, of_one), rtol=1e-12, atol=0)


def test_lengths_belong_to_sequence_ratios(policy, old, advantages):
    with pytest.raises(AssertionError, match="`lengths` belong to"):
        policy_loss(policy, old, advantages, weights(), ratio_level="sequence")


# --- CISPO -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "advantage", "expected"), [(1.1, 2.0, -2.2), (1.5, 2.0, -2.4), (0.5, -1.0, 0.8)])
def test_cispo_weighs_every_token_by_its_bounded_ratio(ratio, advantage, expected):
    policy = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0 - math.log(ratio)], dtype=torch.float64)
    found = gradient(policy, old, torch.tensor([advantage]), torch.ones(1), surrogate="cispo")
    assert found.item() == pytest.approx(expected)


def test_on_policy_cispo_has_the_gradient_of_grpo(policy, advantages):
    same = policy.detach()
    cispo = gradient(policy, same, advantages, weights(), surrogate="cispo")
    torch.testing.assert_close(cispo, gradient(policy, same, advantages, weights()), rtol=1e-12, atol=0)


# --- identities of the clip --------------------------------------------------------------------------------------


def test_wide_clips_give_the_unclipped_surrogate(policy, old, advantages):
    wide = gradient(policy, old, advantages, weights(), clip_low=1.0, clip_high=1e9)
    ratio = torch.exp(policy - old)
    (plain,) = torch.autograd.grad(-(weights() * ratio * advantages).sum(), policy)
    torch.testing.assert_close(wide, plain, rtol=1e-12, atol=0)


# --- recomputed log-probs ----------------------------------------------------------------------------------------


def test_engine_correction_by_hand():
    old = torch.log(torch.tensor([0.5, 0.5, 0.5, 0.9]))
    rollout = torch.log(torch.tensor([0.5, 0.1, 2.0 / 3, 0.05]))
    # weights 1, 5, 0.75, 18
    assert engine_correction(old, rollout, low=None, high=2.0).tolist() == pytest.approx([1, 2, 0.75, 2])
    assert engine_correction(old, rollout, low=0.8, high=6.0).tolist() == pytest.approx([1, 5, 0, 0])


def test_a_single_token_that_the_engine_found_unlikely_is_bounded_and_reported():
    # case G6-17: exp(5.8) = 330.2996
    trainer, engine = torch.tensor([-0.1, -0.2, -0.1]), torch.tensor([-0.1, -6.0, -0.1])
    assert engine_correction(trainer, engine, low=None, high=1e9).tolist() == pytest.approx([1, 330.2996, 1], rel=1e-6)
    assert engine_correction(trainer, engine, low=None, high=2.0).tolist() == [1, 2, 1]
    assert (trainer - engine).sum().item() == pytest.approx(5.8)
    total, largest = mismatch(trainer, engine, torch.ones(3, dtype=torch.bool))
    assert (total.item(), largest.item()) == pytest.approx((330.2996 - 1 - 5.8, 5.8), rel=1e-6)


@pytest.mark.parametrize("low", [None, 0.5])
@pytest.mark.parametrize("broken", ["old", "rollout"])
def test_a_broken_logprob_is_no_masked_token(broken, low):
    # G3-18: NaN is outside every bound and inside none
    logprobs = {"old": torch.tensor([-1.0, -1.0]), "rollout": torch.tensor([-1.0, -1.0])}
    logprobs[broken][1] = math.nan
    first, second = engine_correction(logprobs["old"], logprobs["rollout"], low=low, high=2.0)
    assert first == 1
    assert second.isnan()


def test_recomputed_with_the_same_policy_is_rollout(policy, old, advantages):
    """Where the trainer's old log-probs are the engine's, the weight is 1 and nothing changes."""
    correction = engine_correction(old, old, low=None, high=2.0)
    recomputed = gradient(policy, old, advantages, weights(), correction_T=correction)
    torch.testing.assert_close(recomputed, gradient(policy, old, advantages, weights()), rtol=0, atol=0)


def test_the_correction_undoes_the_engines_sampling_in_expectation():
    """Tokens come from the engine; weighed, their expected gradient is that of tokens of the trainer's policy."""
    torch.manual_seed(5)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    policy = torch.log_softmax(logits, -1)
    engine = torch.log_softmax(logits.detach() + 0.1 * torch.randn(5, dtype=torch.float64), -1)
    values = torch.randn(5, dtype=torch.float64)

    def expected(sampled, correction):
        loss = policy_loss(policy, policy.detach(), values, sampled.exp(), correction_T=correction).loss
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    weighed = expected(engine, engine_correction(policy.detach(), engine, low=None, high=100.0))
    torch.testing.assert_close(weighed, expected(policy.detach(), None), rtol=1e-12, atol=1e-14)


def test_the_correction_leaves_the_kl_alone(policy, old, advantages):
    options = {"reference_logprobs_T": old - 0.5, "kl_beta": 0.1}
    zero = gradient(policy, old, advantages, weights(), correction_T=torch.zeros(NUM_TOKENS), **options)
    without = gradient(policy, old, torch.zeros(NUM_TOKENS, dtype=torch.float64), weights(), **options)
    torch.testing.assert_close(zero, without, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["old", "correction", "reference", "advantages"])
@pytest.mark.parametrize("surrogate", ["clipped", "cispo"])
def test_only_the_policy_has_a_gradient(policy, old, advantages, name, surrogate):
    given = {
        "old": old,
        "correction": torch.ones(NUM_TOKENS, dtype=torch.float64),
        "reference": old - 0.1,
        "advantages": advantages,
    }
    given[name] = given[name].clone().requires_grad_()
    loss = policy_loss(
        policy, given["old"], given["advantages"], weights(), surrogate=surrogate, correction_T=given["correction"],
        reference_logprobs_T=given["reference"], kl_beta=0.1, kl_estimator="k3_unbiased",
    ).loss  # fmt: skip
    assert torch.autograd.grad(loss, given[name], allow_unused=True)[0] is None


# --- KL ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def vocabulary():
    """Policy, old policy and reference over five tokens, all different."""
    torch.manual_seed(7)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    old, reference = (torch.log_softmax(torch.randn(5, dtype=torch.float64), -1) for _ in range(2))
    return logits, torch.log_softmax(logits, -1), old, reference


def test_the_unbiased_k3_has_the_value_and_the_gradient_of_the_reverse_kl_whatever_sampled_the_tokens(vocabulary):
    logits, policy, old, reference = vocabulary
    expected = (old.exp() * kl_k3_unbiased(policy, reference, old)).sum()
    exact = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close(expected, exact, rtol=1e-12, atol=0)
    found, wanted = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (expected, exact))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-14)


def test_the_loss_takes_the_unbiased_k3(vocabulary):
    logits, policy, old, reference = vocabulary
    loss = policy_loss(
        policy, old, torch.zeros(5, dtype=torch.float64), old.exp(), reference_logprobs_T=reference, kl_beta=1.0,
        kl_estimator="k3_unbiased",
    ).loss  # fmt: skip
    exact = (policy.exp() * (policy - reference)).sum()
    found, wanted = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (loss, exact))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-14)


def test_k1_has_the_value_of_the_kl_and_in_a_loss_no_gradient(vocabulary):
    logits, policy, _, reference = vocabulary
    expected = (policy.detach().exp() * kl_k1(policy, reference)).sum()
    torch.testing.assert_close(expected, (policy.exp() * (policy - reference)).sum())
    torch.testing.assert_close(torch.autograd.grad(expected, logits)[0], torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize(
    "options",
    [
        {"surrogate": "cispo"},
        {"ratio_level": "sequence", "lengths": LENGTHS},
        {"kl_beta": 0.3, "kl_estimator": "k3_unbiased"},
    ],
)
def test_gradcheck_of_what_is_not_clipped(policy, advantages, options):
    old = policy.detach() - 0.01 * torch.arange(NUM_TOKENS, dtype=torch.float64)
    if "kl_beta" in options:
        options = options | {"reference_logprobs_T": old - 0.2}

    at = policy.detach().clone()

    def loss(values):
        if options.get("surrogate") == "cispo":
            # Its loss is not the integral of its gradient: the ratio is held still. Checked with the ratio given.
            ratio = torch.exp(at - old).clamp(0.8, 1.2)
            return -(weights() * ratio * advantages * values).sum()
        return policy_loss(values, old, advantages, weights(), **options).loss

    assert torch.autograd.gradcheck(loss, policy)
    torch.testing.assert_close(
        gradient(policy, old, advantages, weights(), **options), torch.autograd.grad(loss(policy), policy)[0]
    )


# --- padding and order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_unbiased"])
@pytest.mark.parametrize("surrogate", ["clipped", "cispo"])
@pytest.mark.parametrize("seed", range(3))
def test_padding_and_the_order_of_tokens_change_nothing(policy, old, advantages, surrogate, estimator, seed):
    """Tokens are shuffled among as many of weight 0, which hold anything."""
    torch.manual_seed(seed)
    places = torch.randperm(2 * NUM_TOKENS)[:NUM_TOKENS]
    reference = old - 0.4 * torch.rand(NUM_TOKENS, dtype=torch.float64)
    correction = torch.rand(NUM_TOKENS, dtype=torch.float64)

    def padded(values, filling=math.nan):
        return torch.full((2 * NUM_TOKENS,), filling, dtype=torch.float64).index_copy(0, places, values)

    def run(policy, old, advantages, weights, reference, correction):
        output = policy_loss(
            policy, old, advantages, weights, correction_T=correction, reference_logprobs_T=reference, kl_beta=0.1,
            surrogate=surrogate, kl_estimator=estimator,
        )  # fmt: skip
        return output.loss, output.sums

    given = [old, advantages, weights(), reference, correction]
    loss, sums = run(policy, *given)
    shuffled_loss, shuffled_sums = run(
        padded(policy), *(padded(values, 0.0 if values is given[2] else math.nan) for values in given)
    )
    torch.testing.assert_close(shuffled_loss, loss, rtol=1e-10, atol=0)
    torch.testing.assert_close(shuffled_sums, sums, rtol=1e-10, atol=0)
    found, wanted = (torch.autograd.grad(value, policy)[0] for value in (shuffled_loss, loss))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)


# --- splits ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normaliser", ["tokens", "sequence"])
@pytest.mark.parametrize("options", [{}, {"surrogate": "cispo"}, {"ratio_level": "sequence"}])
def test_any_split_into_micro_batches_gives_the_same_gradient(policy, old, advantages, normaliser, options):
    """Two micro-batches of two completions, with the totals of the whole step."""
    all_weights = weights(normaliser)

    def of(lengths, part):
        extra = {"lengths": lengths} if "ratio_level" in options else {}
        return policy_loss(policy[part], old[part], advantages[part], all_weights[part], **options, **extra).loss

    cut = sum(LENGTHS[:2])
    whole = torch.autograd.grad(of(LENGTHS, slice(None)), policy)[0]
    split = torch.autograd.grad(of(LENGTHS[:2], slice(0, cut)) + of(LENGTHS[2:], slice(cut, None)), policy)[0]
    torch.testing.assert_close(split, whole, rtol=1e-10, atol=0)
