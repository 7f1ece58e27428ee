"""Parts of the loss that do not fit together are refused with the reason, before anything starts."""

import pytest
from pydantic import ValidationError

from towline.trainer.config import LoraConfig, TrainerConfig


def config(**settings) -> TrainerConfig:
    return TrainerConfig(learning_rate=1e-6, **settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"baseline": "leave_one_out"}, 'RLOO, which divides by no standard deviation.*Set scale = "none"'),
        ({"baseline": "leave_one_out", "scale": "batch_std"}, "its estimate is biased"),
        ({"baseline": "batch"}, 'set scale = "batch_std" or "none"'),
        ({"surrogate": "cispo", "ratio": "sequence", "clip": 3e-4}, 'set ratio = "token"'),
        ({"ratio": "sequence"}, r"clip = 0\.2 would never act\. Set clip = 3e-4 and clip_high = 4e-4"),
        ({"ratio": "sequence", "clip": 3e-4, "kl_estimator": "k3_unbiased"}, "weighs each token by its own ratio"),
        ({"correction": "truncated"}, 'old = "rollout" recomputes none.*Set old = "recomputed"'),
        ({"correction": "masked", "old": "recomputed", "correction_low": 3.0}, r"\(3\) must be below .* \(2\)"),
        ({"kl_place": "reward", "kl_beta": 0.0}, "needs kl_beta > 0"),
        ({"kl_place": "reward", "kl_estimator": "k2"}, "always uses k1"),
        ({"kl_place": "reward", "masks_truncated": True}, "needs the KL of every completion that is compared with"),
        ({"kl_estimator": "k1"}, "expected gradient of zero"),
        (
            {"lora": LoraConfig(), "reference_every": 2},
            "without its adapters, which cannot become the policy",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        config(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"scale": "none", "normaliser": "constant", "kl_beta": 0.0},
        {"clip_high": 0.28, "kl_beta": 0.0},
        {"masks_truncated": True},
        {"ratio": "sequence", "normaliser": "sequence", "clip": 3e-4, "clip_high": 4e-4},
        {"surrogate": "cispo", "clip": 1.0, "clip_high": 0.28, "kl_beta": 0.0},
        {"baseline": "leave_one_out", "scale": "none", "kl_place": "reward"},
        {"baseline": "batch", "scale": "batch_std", "kl_place": "reward"},
        {"old": "recomputed", "correction": "truncated"},
        {"old": "recomputed", "correction": "masked", "correction_high": 5.0},
        {"lora": LoraConfig(rank=8, alpha=8, target_modules=("q_proj", "v_proj"))},
    ],
)
def test_every_member_of_the_table_is_accepted_and_survives_the_run_folder(settings):
    made = config(**settings)
    assert TrainerConfig.model_validate_json(made.model_dump_json()) == made
