"""The plan and the layout of pairs: a chosen and a rejected completion of one prompt, always in one micro-batch.

The loss of a pair compares the two, so they are computed together, and the prompt once where the attention can do it.

Example:
    plan = plan_pairs(prompts, chosen, rejected, num_ranks=size, max_tokens=4096, packing="packed", ...)
    for numbers in plan.micro_batches[rank]:                                # the same number on every rank
        batch = lay_out_pairs([pairs[number] for number in numbers], is_padded=plan.is_padded, ...)
        chosen_P, rejected_P = completion_logprobs(logprobs_N, batch.num_completion_tokens).view(-1, 2).unbind(1)
"""

from collections.abc import Sequence
from dataclasses import replace

from towline.trainer.packing import PackedBatch, pack, pack_pieces
from towline.trainer.packing_buckets import plan_buckets
from towline.trainer.packing_plan import PackingPlan, plan_packing
from towline.trainer.packing_rows import pad_rows
from towline.trainer.packing_step import Packing
from towline.trainer.packing_work import WorkModel
from towline.trainer.token_examples import TokenPair


def plan_pairs(
    num_prompt_tokens: Sequence[int],
    num_chosen_tokens: Sequence[int],
    num_rejected_tokens: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    packing: Packing,
    shares_prompts: bool,
    work: WorkModel,
) -> PackingPlan:
    """Spread pairs over ranks and micro-batches; the same answer on every rank.

    Args:
        num_prompt_tokens, num_chosen_tokens, num_rejected_tokens: of each pair, by number.
        max_tokens: budget of a micro-batch, padding included. A pair that is longer gets one of its own.
        shares_prompts: `Policy.shares_prompts`.
        work: `Policy.work`.

    Returns:
        A plan whose pieces are pairs, by number.
    """
    sizes = list(zip(num_prompt_tokens, num_chosen_tokens, num_rejected_tokens, strict=True))
    if packing == "buckets":
        return _plan_rows(sizes, num_ranks=num_ranks, max_tokens=max_tokens, work=work)
    longest = max((prompt + max(chosen, rejected) for prompt, chosen, rejected in sizes), default=0)
    if shares_prompts:
        num_tokens = [prompt + chosen + rejected for prompt, chosen, rejected in sizes]
        each_work = [work.piece(prompt, completions) for prompt, *completions in sizes]
    else:
        num_tokens = [2 * prompt + chosen + rejected for prompt, chosen, rejected in sizes]
        each_work = [sum(work.piece(prompt, [length]) for length in completions) for prompt, *completions in sizes]
    return plan_packing(
        num_tokens,
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        work=each_work,
        one_batch_tokens=2 * len(sizes) * longest,
    )


def lay_out_pairs(pairs: Sequence[TokenPair], *, is_padded: bool, shares_prompts: bool) -> PackedBatch:
    """Make the micro-batch that `plan_pairs` asks for. Its sequences are chosen, rejected, chosen, rejected, ..."""
    sequences = [sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)]
    if is_padded:
        return pad_rows(sequences)
    return pack_pieces([(pair.chosen, pair.rejected) for pair in pairs]) if shares_prompts else pack(sequences)


def _plan_rows(
    sizes: Sequence[tuple[int, int, int]], *, num_ranks: int, max_tokens: int, work: WorkModel
) -> PackingPlan:
    """Two rows a pair, both as long as the longest row of the micro-batch: as single rows with half the budget."""
    longer = [max(chosen, rejected) for _, chosen, rejected in sizes]
    prompts = [prompt for prompt, _, _ in sizes]
    _, plan = plan_buckets(prompts, longer, num_ranks=num_ranks, max_tokens=max_tokens // 2, work=work)
    num_tokens = sum(2 * prompt + chosen + rejected for prompt, chosen, rejected in sizes)
    return replace(
        plan,
        work=tuple(tuple(2 * each for each in rank) for rank in plan.work),
        num_tokens=num_tokens,
        capacity=2 * plan.capacity,
        one_batch_tokens=2 * plan.one_batch_tokens,
        num_padding_tokens=2 * (plan.num_tokens + plan.num_padding_tokens) - num_tokens,
    )
