"""What ends a run in its loop: a loss or gradient that is not a number, or infinite."""

import math

from towline.storage.errors import NumericsError


def refuse_not_finite(loss: float, gradient_norm: float, step: int) -> None:
    """
    Args:
        loss, gradient_norm: the same on every rank, so that all raise together.

    Raises:
        NumericsError: one of them is not finite.
    """
    if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
        raise NumericsError(
            f"step {step}: loss {loss:g}, gradient norm {gradient_norm:g}; expected finite numbers. The weights "
            "may be spoilt and are not published: go on from the last checkpoint with a lower trainer.learning_rate or "
            f"trainer.max_grad_norm. The step's rollouts are in the ledger (towline samples --step {step}), and "
            f"towline replay --step {step} trains on them again, to the same numbers."
        )
