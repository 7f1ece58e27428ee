import math

import pytest
import torch

from towline.trainer.reward_losses import IGNORED, pair_reward_loss, step_label_loss, step_reward

LN2 = math.log(2)


def tensor(*values, grad=False, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype, requires_grad=grad)


# --- pairs -------------------------------------------------------------------------------------------------------


def test_bradley_terry_by_hand():
    losses_P = pair_reward_loss(tensor(1.0, 2.0, -1.0), tensor(1.0, 0.0, 1.0))
    wanted = [LN2, math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))]
    assert losses_P.tolist() == pytest.approx(wanted)


def test_a_margin_is_taken_off_the_difference():
    losses_P = pair_reward_loss(tensor(3.0, 3.0), tensor(1.0, 1.0), margins_P=tensor(2.0, 0.0))
    assert losses_P.tolist() == pytest.approx([LN2, math.log(1 + math.exp(-2))])


def test_centring_adds_the_square_of_the_sum():
    plain = pair_reward_loss(tensor(3.0, -1.0), tensor(1.0, 1.0))
    centred = pair_reward_loss(tensor(3.0, -1.0), tensor(1.0, 1.0), centring=0.01)
    assert (centred - plain).tolist() == pytest.approx([0.16, 0.0])


def test_scores_may_be_shifted_without_centring_and_not_with_it():
    chosen, rejected = tensor(0.3, -2.0), tensor(0.1, 1.0)
    moved = chosen + 7, rejected + 7
    torch.testing.assert_close(pair_reward_loss(*moved), pair_reward_loss(chosen, rejected))
    assert (pair_reward_loss(*moved, centring=0.1) > pair_reward_loss(chosen, rejected, centring=0.1) + 1).all()


def test_centring_alone_moves_the_mean_of_scores_to_zero():
    chosen, rejected = tensor(5.0, grad=True), tensor(4.0, grad=True)
    with_it = torch.autograd.grad(pair_reward_loss(chosen, rejected, centring=0.5).sum(), (chosen, rejected))
    without = torch.autograd.grad(pair_reward_loss(chosen, rejected).sum(), (chosen, rejected))
    assert [(new - old).item() for new, old in zip(with_it, without, strict=True)] == pytest.approx([9.0, 9.0])


@pytest.mark.parametrize("centring", [0.0, 0.3])
def test_gradcheck_of_pairs(centring):
    torch.manual_seed(0)
    chosen, rejected, margins = torch.randn(3, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda chosen, rejected: pair_reward_loss(chosen, rejected, margins_P=margins, centring=centring),
        (chosen.requires_grad_(), rejected.requires_grad_()),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_differences_of_ten_thousand_stay_finite(dtype):
    chosen = tensor(1e4, -1e4, grad=True, dtype=dtype)
    losses_P = pair_reward_loss(chosen, torch.zeros_like(chosen))
    losses_P.sum().backward()
    assert losses_P.tolist() == [0.0, 1e4]
    assert chosen.grad.tolist() == [0.0, -1.0]


def test_no_pairs_give_nothing_that_is_connected():
    nothing = tensor(grad=True)
    pair_reward_loss(nothing, nothing, centring=0.1).sum().backward()
    assert nothing.grad.shape == (0,)


def test_bfloat16_scores_are_compared_in_float32():
    chosen, rejected = tensor(2.0, dtype=torch.bfloat16), tensor(0.0, dtype=torch.bfloat16)
    losses_P = pair_reward_loss(chosen, rejected)
    assert losses_P.dtype is torch.float32
    assert losses_P.item() == pytest.approx(math.log(1 + math.exp(-2)), rel=1e-6)


# --- steps -------------------------------------------------------------------------------------------------------


def test_labelled_steps_alone_carry_a_loss():
    """G3-43: labels [-100, -100, 0, -100, 1] are of positions 2 and 4."""
    scores = tensor(0.3, -0.2, 1.0, float("nan"), 2.0, grad=True)
    labels = torch.tensor([-100, -100, 0, -100, 1])
    loss = step_label_loss(scores, labels, num_labelled=2)
    loss.backward()
    assert loss.item() == pytest.approx((math.log(1 + math.exp(1)) + math.log(1 + math.exp(-2))) / 2)
    assert scores.grad.nonzero().flatten().tolist() == [2, 4]
    assert scores.grad[2].item() == pytest.approx(0.5 / (1 + math.exp(-1)))


def test_labels_that_became_bool_are_refused():
    """G3-43: -100 became true, so that every token was a correct step."""
    with pytest.raises(AssertionError, match="-100 is true"):
        step_label_loss(tensor(0.0, 0.0), torch.tensor([-100, 1]).bool(), num_labelled=2)


@pytest.mark.parametrize("label", [2, -1, 100])
def test_other_labels_are_refused(label):
    with pytest.raises(AssertionError, match="not 0, 1 or -100"):
        step_label_loss(tensor(0.0), torch.tensor([label]), num_labelled=1)


def test_the_mean_is_over_the_optimiser_step_however_it_is_split():
    torch.manual_seed(0)
    scores, labels = torch.randn(9, dtype=torch.float64), torch.tensor([1, 0, -100, -100, 1, 1, -100, 0, 0])
    whole = step_label_loss(scores, labels, num_labelled=6)
    parts = [step_label_loss(scores[part], labels[part], num_labelled=6) for part in (slice(0, 4), slice(4, 9))]
    torch.testing.assert_close(sum(parts), whole)
    kept = labels != IGNORED
    wanted = torch.nn.functional.binary_cross_entropy(torch.sigmoid(scores[kept]), labels[kept].double())
    torch.testing.assert_close(whole, wanted)


def test_a_micro_batch_without_labels_is_zero_and_connected():
    scores = tensor(0.5, 0.5, grad=True)
    loss = step_label_loss(scores, torch.tensor([-100, -100]), num_labelled=3)
    loss.backward()
    assert (loss.item(), scores.grad.tolist()) == (0.0, [0.0, 0.0])


def test_an_optimiser_step_without_labels_is_refused():
    with pytest.raises(AssertionError, match="need one at least"):
        step_label_loss(tensor(0.5), torch.tensor([-100]), num_labelled=0)


def test_gradcheck_of_steps():
    torch.manual_seed(1)
    scores = torch.randn(5, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, -100, 1, 0])
    assert torch.autograd.gradcheck(lambda scores: step_label_loss(scores, labels, num_labelled=4), (scores,))


@pytest.mark.parametrize(("how", "wanted"), [("min", 0.2), ("product", 0.144), ("mean", 0.633333)])
def test_steps_make_one_reward(how, wanted):
    """G3-44."""
    assert step_reward([0.9, 0.2, 0.8], how) == pytest.approx(wanted, abs=1e-6)
    assert step_reward([0.7], how) == pytest.approx(0.7)


@pytest.mark.parametrize("how", ["min", "product", "mean"])
def test_no_steps_and_a_failed_step_have_no_reward(how):
    """G3-44: neither a 0, which would punish, nor a 1, which an empty product is."""
    assert math.isnan(step_reward([], how))
    assert math.isnan(step_reward([0.9, math.nan], how))
    assert math.isnan(step_reward([math.nan, 0.9], how))
