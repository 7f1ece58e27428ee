"""The micro-batches of one optimiser step on given examples."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from towline.trainer.config import EngineConfig
from towline.trainer.packed_model import PackedModel
from towline.trainer.packing import PackedBatch, TokenSequence
from towline.trainer.packing_plan import PackingPlan, Piece
from towline.trainer.packing_rows import lay_out
from towline.trainer.packing_step import plan_step


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleStep:
    sequences: Sequence[TokenSequence]
    pieces: Sequence[Piece]
    plan: PackingPlan

    def batches(self) -> Iterator[tuple[PackedBatch, list[int]]]:
        """Micro-batches of this rank, each with the indices of its sequences; the same number on every rank."""
        for numbers in self.plan.micro_batches[dist.get_rank()]:
            pieces = [self.pieces[number].members for number in numbers]
            tokens = [[self.sequences[index] for index in members] for members in pieces]
            yield lay_out(tokens, is_padded=self.plan.is_padded), list(chain.from_iterable(pieces))

    @property
    def num_micro_batches(self) -> int:
        return len(self.plan.micro_batches[0])

    def metrics(self) -> dict[str, float]:
        return {
            "tokens/trained": sum(piece.num_tokens for piece in self.pieces),
            "tokens/fill": self.plan.fill,
            "tokens/padding_saved": self.plan.padding_saved,
            "tokens/imbalance": self.plan.rank_imbalance,
        }


def plan_examples(
    sequences: Sequence[TokenSequence], groups: Sequence[int], config: EngineConfig, model: PackedModel
) -> ExampleStep:
    """
    Args:
        groups: of each sequence; those of one group have one prompt, which is computed once where that can be.
    """
    pieces, plan = plan_step(
        [sequence.num_prompt_tokens for sequence in sequences],
        [len(sequence.token_ids) - sequence.num_prompt_tokens for sequence in sequences],
        groups,
        num_ranks=dist.get_world_size(),
        max_tokens=config.max_tokens_per_microbatch,
        packing=config.packing,
        shares_prompts=model.shares_prompts,
        work=model.work,
    )
    return ExampleStep(sequences=sequences, pieces=pieces, plan=plan)


def only(batch: PackedBatch, wanted: Sequence[NDArray[np.bool_]]) -> PackedBatch:
    """The batch with log-probs of some of its completion tokens alone; the others are read and not predicted.

    Args:
        wanted: of each sequence, whether each of its completion tokens is predicted.
    """
    is_wanted = np.concatenate(wanted) if wanted else np.empty(0, dtype=np.bool_)
    return replace(
        batch,
        logit_index=batch.logit_index[is_wanted],
        target_ids=batch.target_ids[is_wanted],
        completion_index=batch.completion_index[is_wanted],
        num_completion_tokens=tuple(int(each.sum()) for each in wanted),
    )
