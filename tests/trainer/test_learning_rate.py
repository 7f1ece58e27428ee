import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from towline.trainer.learning_rate import learning_rate

PEAK, WARMUP, TOTAL = 1e-5, 10, 50


def rate(step, schedule="constant", **options):
    return learning_rate(
        step, **({"peak": PEAK, "schedule": schedule, "warmup_steps": WARMUP, "total_steps": TOTAL} | options)
    )


def of_transformers(make, steps, **options):
    """The rates that a run with this scheduler has, step after step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = make(optimizer, num_warmup_steps=WARMUP, **options)
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def test_the_warm_up_by_hand():
    """G3-38: 10 steps to 1e-5; the fourth step has 4e-6."""
    assert [rate(step) for step in range(12)] == pytest.approx([1e-6 * n for n in range(1, 11)] + [1e-5, 1e-5])
    assert rate(3) == pytest.approx(4e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_resumed_run_has_the_rates_of_the_undisturbed_one(schedule):
    """G3-38: nothing is kept between steps, so there is nothing to advance twice."""
    straight = [rate(step, schedule) for step in range(TOTAL)]
    resumed = [rate(step, schedule) for step in range(4)] + [rate(step, schedule) for step in range(4, TOTAL)]
    assert resumed == straight
    assert rate(4, schedule) == pytest.approx(5e-6)


@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
def test_a_constant_rate_is_the_peak_after_the_warm_up(warmup_steps):
    for count in range(20):
        wanted = PEAK * min(1.0, (count + 1) / max(1, warmup_steps))
        assert learning_rate(count, peak=PEAK, schedule="constant", warmup_steps=warmup_steps) == wanted


@pytest.mark.parametrize(
    ("schedule", "make", "options", "floor_ratio"),
    [
        ("constant", get_constant_schedule_with_warmup, {}, 0.0),
        ("linear", get_linear_schedule_with_warmup, {"num_training_steps": TOTAL}, 0.0),
        ("cosine", get_cosine_schedule_with_warmup, {"num_training_steps": TOTAL}, 0.0),
        (
            "cosine",
            get_cosine_with_min_lr_schedule_with_warmup,
            {"num_training_steps": TOTAL, "min_lr_rate": 0.1},
            0.1,
        ),
    ],
)
def test_rates_are_those_of_transformers_whose_warm_up_is_a_step_behind(schedule, make, options, floor_ratio):
    theirs = of_transformers(make, TOTAL + 1, **options)
    ours = [rate(step, schedule, floor_ratio=floor_ratio) for step in range(TOTAL + 1)]
    assert ours[WARMUP:] == pytest.approx(theirs[WARMUP:], rel=1e-12, abs=1e-20)
    assert ours[: WARMUP - 1] == pytest.approx(theirs[1:WARMUP], rel=1e-12)
    assert (theirs[0], ours[WARMUP - 1]) == (0.0, PEAK)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_no_step_of_the_run_is_lost_at_a_rate_of_zero(schedule):
    rates = [rate(step, schedule) for step in range(TOTAL)]
    assert min(rates) > 0
    assert max(rates) == PEAK
    assert rate(TOTAL, schedule) == pytest.approx(0.0, abs=1e-20)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_rate_falls_to_the_floor_and_stays_there(schedule):
    rates = [rate(step, schedule, floor_ratio=0.2) for step in range(WARMUP, TOTAL + 5)]
    assert rates == sorted(rates, reverse=True)
    assert rates[TOTAL - WARMUP :] == pytest.approx([0.2 * PEAK] * 5)
    assert rates[(TOTAL - WARMUP) // 2] == pytest.approx(0.6 * PEAK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_steps": None}, "needs total_steps"),
        ({"total_steps": 10}, "10 warm-up steps of 10, expected fewer"),
    ],
)
def test_a_fall_without_room_is_refused(options, message):
    with pytest.raises(AssertionError, match=message):
        rate(20, "linear", **options)
