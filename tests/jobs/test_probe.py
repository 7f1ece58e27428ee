"""The probe tells weights that are used from weights that merely arrived, and says so when it cannot tell."""

import numpy as np
import pytest

from towline.jobs.probe import FLOAT32_BOUND, Probe, probe_tokens
from towline.storage.errors import ProbeError

RANDOM = np.random.default_rng(0)
OLD = RANDOM.normal(-4.0, 1.0, 256).astype(np.float32)
DIRECTION = RANDOM.normal(0.0, 1.0, 256).astype(np.float32)
BFLOAT16_NOISE = 0.03


def moved_by(size: float) -> np.ndarray:
    """The trainer's log-probs after a step of this size, nats."""
    return OLD + np.float32(size) * DIRECTION


def engine_at(logprobs: np.ndarray, noise: float = 2e-5, seed: int = 1) -> list[float]:
    """What an engine with these weights answers; `noise` is the largest difference, nats."""
    return (logprobs + np.random.default_rng(seed).uniform(-noise, noise, logprobs.shape)).tolist()


def calibrated_in_bfloat16() -> Probe:
    probe = Probe(is_float32=False)
    probe.calibrate([engine_at(OLD, BFLOAT16_NOISE, seed) for seed in (1, 2)], OLD)
    return probe


def test_the_probe_text_is_the_same_in_every_process_and_within_the_vocabulary():
    tokens = probe_tokens(49, 256)
    assert tokens == probe_tokens(49, 256)
    assert len(tokens) == 256
    assert set(tokens) <= set(range(49))
    assert len(set(tokens)) > 40


def test_engines_with_the_new_weights_pass_and_their_distances_are_reported():
    new = moved_by(0.1)
    metrics = Probe(is_float32=True).judge(3, [engine_at(new), engine_at(new, seed=2)], new, OLD)
    assert metrics["probe/verdict"] == 1.0
    assert 1e-5 < metrics["probe/new"] <= 2.1e-5
    assert metrics["probe/old"] > 0.1


def test_a_step_too_small_to_tell_apart_is_inconclusive_even_for_an_engine_with_old_weights():
    new = moved_by(1e-5)
    for engine in (engine_at(new), engine_at(OLD)):
        assert Probe(is_float32=True).judge(3, [engine], new, OLD)["probe/verdict"] == 0.0


def test_an_engine_with_old_weights_is_named():
    new = moved_by(0.1)
    with pytest.raises(ProbeError, match=r"engine 1 does not use the weights of version 7"):
        Probe(is_float32=True).judge(7, [engine_at(new), engine_at(OLD)], new, OLD)


def test_an_engine_with_old_weights_is_caught_within_the_bound_too():
    new = moved_by(6e-5)
    assert np.abs(new - OLD).max() < 3 * FLOAT32_BOUND
    with pytest.raises(ProbeError, match="does not use the weights"):
        Probe(is_float32=True).judge(1, [engine_at(OLD, 1e-6)], new, OLD)


def test_one_logprob_beyond_the_bound_is_refused_though_all_others_are_right():
    new = moved_by(0.1)
    engine = engine_at(new)
    engine[100] += 2 * FLOAT32_BOUND
    with pytest.raises(ProbeError, match=r"engine 0, version 2: .* at most 0\.0001"):
        Probe(is_float32=True).judge(2, [engine], new, OLD)


def test_an_engine_that_answers_with_a_mixture_is_refused():
    new = moved_by(0.1)
    mixture = np.where(np.arange(256) % 2, new, OLD)
    with pytest.raises(ProbeError):
        Probe(is_float32=True).judge(2, [engine_at(mixture)], new, OLD)


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_a_logprob_that_is_no_number_is_refused(broken: float):
    new = moved_by(0.1)
    engine = engine_at(new)
    engine[3] = broken
    with pytest.raises(ProbeError):
        Probe(is_float32=True).judge(2, [engine], new, OLD)
    with pytest.raises(ProbeError):
        calibrated_in_bfloat16().judge(2, [engine], new, OLD)


def test_float32_keeps_its_fixed_bound_whatever_was_measured():
    probe, new = Probe(is_float32=True), moved_by(0.5)
    far = engine_at(new, 0.01)
    probe.calibrate([far], new)
    with pytest.raises(ProbeError, match=r"at most 0\.0001 and 0\.0001"):
        probe.judge(0, [far], new, OLD)


def test_bfloat16_allows_what_rounding_was_measured_to_do_and_no_more():
    new = moved_by(0.2)
    metrics = calibrated_in_bfloat16().judge(1, [engine_at(new, BFLOAT16_NOISE, seed=9)], new, OLD)
    assert metrics["probe/verdict"] == 1.0
    shifted = engine_at(new, BFLOAT16_NOISE)
    shifted[0] += 5 * BFLOAT16_NOISE
    with pytest.raises(ProbeError, match=r"0\.15 nats at most"):
        calibrated_in_bfloat16().judge(1, [shifted], new, OLD)


def test_bfloat16_calls_a_small_step_inconclusive_and_catches_old_weights_after_a_large_one():
    small = moved_by(BFLOAT16_NOISE / 2)
    probe = calibrated_in_bfloat16()
    assert probe.judge(1, [engine_at(OLD, BFLOAT16_NOISE)], small, OLD)["probe/verdict"] == 0.0
    with pytest.raises(ProbeError, match="does not use the weights"):
        probe.judge(2, [engine_at(OLD, BFLOAT16_NOISE)], moved_by(0.2), OLD)


def test_bfloat16_refuses_an_engine_that_keeps_a_small_part_of_the_old_weights():
    """A stale output head leaves the engine much nearer to the new weights than to the old."""
    new = moved_by(0.5)
    with pytest.raises(ProbeError, match="or with a part of them"):
        calibrated_in_bfloat16().judge(1, [engine_at(moved_by(0.42), BFLOAT16_NOISE)], new, OLD)


def test_a_large_step_that_cannot_be_told_apart_is_an_error():
    small = moved_by(BFLOAT16_NOISE / 2)
    with pytest.raises(ProbeError, match="large step"):
        calibrated_in_bfloat16().judge(0, [engine_at(small, BFLOAT16_NOISE)], small, OLD, must_conclude=True)


def test_in_bfloat16_the_noise_may_grow_with_the_log_probs():
    twice, noisy = 2 * moved_by(0.5), 5 * BFLOAT16_NOISE
    assert calibrated_in_bfloat16().judge(1, [engine_at(twice, noisy)], twice, OLD)["probe/verdict"] == 1.0
    with pytest.raises(ProbeError):
        calibrated_in_bfloat16().judge(1, [engine_at(moved_by(0.5), noisy)], moved_by(0.5), OLD)
