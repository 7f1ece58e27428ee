"""Training a process reward model on judged steps, from top to bottom: an optimiser step.

    solutions = those of the step
    loss = mean over their judged steps of the cross entropy of sigmoid(score) with the label, over all ranks
    one optimiser step at the learning rate of the step's number

A step is scored at its last token (Lightman et al. 2023, arXiv:2305.20050). S = steps of a micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from towline.trainer.config import EngineConfig
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.example_step import plan_examples
from towline.trainer.optimiser_step import step_optimiser
from towline.trainer.packing import PackedBatch
from towline.trainer.rank_sums import rank_sums
from towline.trainer.reward_losses import step_label_loss
from towline.trainer.sequence_head import RewardModel
from towline.trainer.supervised import Metrics
from towline.trainer.supervised_config import StepRewardConfig
from towline.trainer.token_examples import NO_LABEL, TokenSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReward:
    engine: DeepSpeedEngine[RewardModel]
    config: StepRewardConfig
    examples: Sequence[TokenSteps]
    rows: Callable[[int], Sequence[int]]
    """Step → which examples it trains on."""
    total_steps: int
    on_progress: Callable[[str], None]

    def take_step(self, step: int) -> Metrics:
        """
        Raises:
            NumericsError: loss or gradient are not finite.
        """
        engine = self.engine
        examples = [self.examples[row] for row in self.rows(step)]
        planned = plan_examples([one.tokens for one in examples], range(len(examples)), self.config, engine.policy)
        num_labelled = sum(num_judged(one) for one in examples)
        sums = {"loss/step_labels": 0.0, "steps/accuracy": 0.0}
        for number, (batch, members) in enumerate(planned.batches()):
            self.on_progress("train")
            solutions = [examples[index] for index in members]
            scores_S = engine.scores(batch, step_positions(batch, solutions))
            labels_S = torch.from_numpy(_labels(solutions)).to(scores_S.device)
            loss = step_label_loss(scores_S, labels_S, num_labelled=num_labelled)
            engine.backward(loss, is_last=number == planned.num_micro_batches - 1)
            sums["loss/step_labels"] += loss.item()
            sums["steps/accuracy"] += float(((scores_S > 0) == (labels_S == 1))[labels_S != NO_LABEL].sum())
        totals = rank_sums(sums)
        ended = step_optimiser(engine, self.config, step, total_steps=self.total_steps, loss=totals["loss/step_labels"])
        totals["steps/accuracy"] /= num_labelled
        return planned.metrics() | ended | totals | {"tokens/loss": num_labelled}


def step_scores(
    engine: DeepSpeedEngine[RewardModel],
    config: EngineConfig,
    examples: Sequence[TokenSteps],
    on_progress: Callable[[], None],
) -> list[NDArray[np.float64]]:
    """Of each example the score of each of its steps, without gradient; the same on every rank. Every rank calls it."""
    offsets = np.concatenate([[0], np.cumsum([len(one.step_ends) for one in examples])])
    scores = torch.zeros(int(offsets[-1]), dtype=torch.float64)
    planned = plan_examples([one.tokens for one in examples], range(len(examples)), config, engine.policy)
    for batch, members in planned.batches():
        on_progress()
        found = engine.evaluate_scores(batch, step_positions(batch, [examples[index] for index in members]))
        places = [np.arange(offsets[index], offsets[index + 1]) for index in members]
        if places:
            scores[np.concatenate(places)] = found.double().cpu()
    dist.all_reduce(scores)
    return np.split(scores.numpy(), offsets[1:-1])


def step_positions(batch: PackedBatch, examples: Sequence[TokenSteps]) -> NDArray[np.int64]:
    """[S] where in the batch the last token of each step lies.

    Args:
        examples: of the batch, in its order.
    """
    return np.concatenate([np.empty(0, dtype=np.int64), *_each_positions(batch, examples)])


def num_judged(example: TokenSteps) -> int:
    return int((example.labels != NO_LABEL).sum())


def _each_positions(batch: PackedBatch, examples: Sequence[TokenSteps]) -> Iterator[NDArray[np.int64]]:
    places = np.split(batch.completion_index, np.cumsum(batch.num_completion_tokens)[:-1]) if examples else []
    for example, tokens in zip(examples, places, strict=True):
        yield tokens[example.step_ends - example.tokens.num_prompt_tokens]


def _labels(examples: Sequence[TokenSteps]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, dtype=np.int64), *(one.labels for one in examples)])
