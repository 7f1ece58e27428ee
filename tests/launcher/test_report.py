import numpy as np
import pytest

from towline.launcher.report import draw_reward_curve, rolling_mean
from towline.storage.metrics import append_jsonl
from towline.storage.run_directory import RunDirectory

PNG = b"\x89PNG\r\n\x1a\n"


def test_the_picture_is_drawn(run: RunDirectory) -> None:
    draw_reward_curve(run)
    assert run.reward_curve.read_bytes().startswith(PNG)


def test_the_picture_is_drawn_without_evaluations_and_reference(run: RunDirectory) -> None:
    run.evaluations.unlink()
    run.metrics.unlink()
    for step in range(30):
        append_jsonl(run.metrics, {"step": step, "reward/mean": float("nan") if step == 3 else 0.1 * step})
    draw_reward_curve(run)
    assert run.reward_curve.read_bytes().startswith(PNG)


def test_nothing_is_drawn_before_the_first_step(run: RunDirectory) -> None:
    run.metrics.unlink()
    draw_reward_curve(run)
    assert not run.reward_curve.exists()


def test_the_rolling_mean_looks_back_only_and_leaves_out_what_is_missing() -> None:
    values = np.array([1.0, 3.0, np.nan, 5.0])
    np.testing.assert_allclose(rolling_mean(values, 2), [1.0, 2.0, 3.0, 5.0])
    assert np.isnan(rolling_mean(np.array([np.nan]), 1)).all()
    holes = np.array([0.2, np.nan, 0.4, np.nan, 0.9])
    assert rolling_mean(holes, 5)[-1] == pytest.approx(1.5 / 3)
