"""The plan of one optimiser step: packed, with the cut of its groups that is fastest, or in buckets."""

from collections.abc import Sequence
from typing import Literal

from towline.trainer.packing_buckets import plan_buckets
from towline.trainer.packing_plan import PackingPlan, Piece, cut_into_pieces, plan_packing
from towline.trainer.packing_work import WorkModel

Packing = Literal["packed", "buckets"]

MICRO_BATCH_OVERHEAD = 0.05
"""What a micro-batch costs however little is in it (gathered weights, launches), of the linear work of a full one. A
guess; it decides between few full micro-batches that repeat prompts and many that do not."""


def plan_step(
    num_prompt_tokens: Sequence[int],
    num_completion_tokens: Sequence[int],
    groups: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    packing: Packing,
    shares_prompts: bool,
    work: WorkModel,
) -> tuple[list[Piece], PackingPlan]:
    """Decide which sequences each rank computes together; the same answer on every rank.

    Whole groups share most, but large pieces fill micro-batches badly and ranks unevenly. So groups are cut to the
    budget, to a half and a quarter of it, and into single completions, and the cut with the least estimated time is
    taken.

    Args:
        num_prompt_tokens, num_completion_tokens, groups: of each sequence, by index; sequences of one group have one
            prompt.
        max_tokens: budget of a micro-batch, padding included.
        shares_prompts: `Policy.shares_prompts`.
        work: `Policy.work`.

    Returns:
        Pieces, and the plan that numbers them; `packing_rows.lay_out` makes its micro-batches.
    """
    if packing == "buckets":
        return plan_buckets(
            num_prompt_tokens, num_completion_tokens, num_ranks=num_ranks, max_tokens=max_tokens, work=work
        )
    lengths = [sum(pair) for pair in zip(num_prompt_tokens, num_completion_tokens, strict=True)]

    def planned(largest_piece: int) -> tuple[list[Piece], PackingPlan]:
        pieces = cut_into_pieces(
            num_prompt_tokens, num_completion_tokens, groups,
            num_ranks=num_ranks, max_tokens=largest_piece, shares_prompts=shares_prompts,
        )  # fmt: skip
        plan = plan_packing(
            [piece.num_tokens for piece in pieces],
            num_ranks=num_ranks,
            max_tokens=max_tokens,
            work=[
                work.piece(
                    num_prompt_tokens[piece.members[0]], [num_completion_tokens[index] for index in piece.members]
                )
                for piece in pieces
            ],
            one_batch_tokens=len(lengths) * max(lengths, default=0),
        )
        return pieces, plan

    def time(candidate: tuple[list[Piece], PackingPlan]) -> float:
        plan = candidate[1]
        return plan.slowest_work + MICRO_BATCH_OVERHEAD * len(plan.work[0]) * max_tokens * work.per_token

    # `min` takes the first of equals: the one that shares most.
    cuts = (max_tokens, max_tokens // 2, max_tokens // 4, 0) if shares_prompts else (0,)
    return min((planned(largest_piece) for largest_piece in cuts), key=time)
