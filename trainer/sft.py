"""Supervised fine-tuning, from top to bottom: an optimiser step on demonstrations.

    examples = those of the step
    loss = -sum of log p(token) over their trained tokens, divided by how many these are over all ranks
    one optimiser step at the learning rate of the step's number

N = trained tokens of a micro-batch, C = those of one chunk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.example_step import only, plan_examples
from towline.trainer.optimiser_step import step_optimiser
from towline.trainer.supervised import Metrics
from towline.trainer.supervised_config import SftConfig
from towline.trainer.token_examples import TokenExample


@dataclass(frozen=True, slots=True, kw_only=True)
class Sft:
    engine: DeepSpeedEngine
    config: SftConfig
    examples: Sequence[TokenExample]
    rows: Callable[[int], Sequence[int]]
    """Step → which examples it trains on."""
    total_steps: int
    on_progress: Callable[[str], None]

    def take_step(self, step: int) -> Metrics:
        """
        Raises:
            NumericsError: loss or gradient are not finite.
        """
        config, engine = self.config, self.engine
        examples = [self.examples[row] for row in self.rows(step)]
        planned = plan_examples([one.tokens for one in examples], range(len(examples)), config, engine.policy)
        num_trained = sum(int(one.trained.sum()) for one in examples)

        def token_loss(logprobs_C: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
            """With its slope: it is the same for every token."""
            return -logprobs_C / num_trained, torch.full_like(logprobs_C, -1 / num_trained)

        total = torch.zeros((), dtype=torch.float64)
        for number, (batch, members) in enumerate(planned.batches()):
            self.on_progress("train")
            batch = only(batch, [examples[index].trained for index in members])
            loss, _, _ = engine.forward_with_loss(
                batch, token_loss, with_entropy=False, label_smoothing=config.label_smoothing
            )
            engine.backward(loss, is_last=number == planned.num_micro_batches - 1)
            total += loss.detach().double().cpu()
        dist.all_reduce(total)
        ended = step_optimiser(engine, config, step, total_steps=self.total_steps, loss=total.item())
        return planned.metrics() | ended | {"loss/nll": total.item(), "tokens/loss": num_trained}
