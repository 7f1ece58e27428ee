"""The end of an optimiser step on given examples: its learning rate, the step itself, what must be finite."""

from typing import Any

from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.learning_rate import learning_rate
from towline.trainer.memory import peak_gib
from towline.trainer.not_finite import OF_EXAMPLES, refuse_not_finite
from towline.trainer.supervised_config import SupervisedConfig


def step_optimiser(
    engine: DeepSpeedEngine[Any], config: SupervisedConfig, step: int, *, total_steps: int, loss: float
) -> dict[str, float]:
    """Apply the gathered gradients; return metrics. Every rank must call it.

    Args:
        loss: of the whole step, the same on every rank.

    Raises:
        NumericsError: loss or gradient are not finite.
    """
    rate = learning_rate(
        step,
        peak=config.learning_rate,
        schedule=config.schedule,
        warmup_steps=config.warmup_steps,
        total_steps=total_steps,
    )
    gradient_norm = engine.step(rate)
    refuse_not_finite(loss, gradient_norm, step, look=OF_EXAMPLES)
    return {"loss/gradient_norm": gradient_norm, "loss/learning_rate": rate, "memory/trainer_gib": peak_gib()}
