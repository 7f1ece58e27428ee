"""Direct preference optimisation, from top to bottom: an optimiser step on pairs.

    pairs = those of the step
    the gradient of their mean loss, see `preference_gradient`
    one optimiser step at the learning rate of the step's number

The reference's log-probs are a table, computed before.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.optimiser_step import step_optimiser
from towline.trainer.policy import Policy
from towline.trainer.preference_gradient import add_preference_gradient
from towline.trainer.supervised import Metrics
from towline.trainer.supervised_config import DpoConfig
from towline.trainer.token_examples import TokenPair


@dataclass(frozen=True, slots=True, kw_only=True)
class Dpo:
    engine: DeepSpeedEngine[Policy]
    config: DpoConfig
    pairs: Sequence[TokenPair]
    reference: NDArray[np.float64]
    """[pairs, 2], of chosen and rejected, sums over the completion, nats."""
    rows: Callable[[int], Sequence[int]]
    """Step → which pairs it trains on."""
    total_steps: int
    on_progress: Callable[[str], None]

    def take_step(self, step: int) -> Metrics:
        """
        Raises:
            NumericsError: loss or gradient are not finite.
        """
        rows = list(self.rows(step))
        pairs = [self.pairs[row] for row in rows]
        metrics = add_preference_gradient(self.engine, self.config, pairs, self.reference[rows], self.on_progress)
        return metrics | step_optimiser(
            self.engine, self.config, step, total_steps=self.total_steps, loss=metrics["loss/preference"]
        )
