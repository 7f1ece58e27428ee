"""What ends a run in its loop: a loss or gradient that is not a number, or infinite."""

import math

from towline.storage.errors import NumericsError


def of_rollouts(step: int) -> str:
    """Where to look at a step that learned from rollouts."""
    return (
        f"The step's rollouts are in the ledger (towline samples --step {step}), and towline replay --step {step} "
        "trains on them again, to the same numbers."
    )


OF_EXAMPLES = "With the same settings the same examples come again in this step, and with them the same numbers."
"""Of a step that learned from given examples: nothing but them and the settings led to it."""


def refuse_not_finite(loss: float, gradient_norm: float, step: int, *, look: str) -> None:
    """
    Args:
        loss, gradient_norm: the same on every rank, so that all raise together.
        look: what leads back to the step, as a sentence.

    Raises:
        NumericsError: one of them is not finite.
    """
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        raise NumericsError(
            f"step {step}: loss {loss:g}, gradient norm {gradient_norm:g}; expected finite numbers. The weights "
            "may be spoilt and are not kept: go on from the last checkpoint with a lower trainer.learning_rate or "
            f"trainer.max_grad_norm. {look}"
        )
