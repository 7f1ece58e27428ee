"""One optimiser step of an outer step: its sequences, how they are packed and spread over ranks, what they count."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from towline.trainer.normaliser import LossTotals
from towline.trainer.packing import PackedBatch
from towline.trainer.packing_plan import PackingPlan, Piece
from towline.trainer.packing_rows import lay_out
from towline.trainer.rollout_batch import TrainingSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerStep:
    """Fixed for all inner epochs."""

    sequences: Sequence[TrainingSequence]
    pieces: Sequence[Piece]
    plan: PackingPlan
    totals: LossTotals

    def batches(self, rank: int) -> list[tuple[PackedBatch, list[int]]]:
        """Micro-batches of the rank, each with the indices of its sequences."""
        packed: list[tuple[PackedBatch, list[int]]] = []
        for numbers in self.plan.micro_batches[rank]:
            pieces = [self.pieces[number].members for number in numbers]
            tokens = [[self.sequences[index].tokens for index in members] for members in pieces]
            batch = lay_out(tokens, is_padded=self.plan.is_padded)
            packed.append((batch, list(chain.from_iterable(pieces))))
        return packed

    def with_advantages(self, advantages: Mapping[tuple[int, int], float]) -> "InnerStep":
        """
        Args:
            advantages: by (group, member).
        """
        changed = [
            dataclasses.replace(sequence, advantage=advantages[sequence.group, sequence.member])
            for sequence in self.sequences
        ]
        return dataclasses.replace(self, sequences=changed)
