"""The alternative to packing: micro-batches of sequences of like length, each a row, padded to the longest.

For models that cannot keep the sequences of one row apart; rows of a batch are apart in every model. Padding costs up
to `SPREAD`, about half of that on average, and a prompt is computed again for each of its completions.
"""

from collections.abc import Sequence

from towline.trainer.packing_partition import heaviest_first, most_even_rounds
from towline.trainer.packing_plan import PackingPlan, Piece
from towline.trainer.packing_work import WorkModel

SPREAD = 0.1
"""Largest (longest - shortest) / longest of a bucket."""


def plan_buckets(
    num_prompt_tokens: Sequence[int],
    num_completion_tokens: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    work: WorkModel,
) -> tuple[list[Piece], PackingPlan]:
    """Spread sequences over ranks and micro-batches of like length; the same answer on every rank.

    The micro-batches with most work are halved until their number is a multiple of the ranks.

    Args:
        num_prompt_tokens, num_completion_tokens: of each sequence, by index.
        max_tokens: budget of a micro-batch, rows times the longest. A longer sequence gets one of its own.

    Returns:
        A piece for each sequence, by index, and a plan whose micro-batches are rows: `PackingPlan.is_padded`.
    """
    lengths = [sum(pair) for pair in zip(num_prompt_tokens, num_completion_tokens, strict=True)]

    def bucket_work(bucket: list[int]) -> int:
        longest = max((lengths[index] for index in bucket), default=0)
        return sum(work.row(longest, num_completion_tokens[index]) for index in bucket)

    buckets = _buckets(lengths, max_tokens)
    while len(buckets) % num_ranks and any(len(bucket) > 1 for bucket in buckets):
        heaviest = max((bucket for bucket in buckets if len(bucket) > 1), key=bucket_work)
        buckets.remove(heaviest)
        half = len(heaviest) // 2
        buckets += [heaviest[:half], heaviest[half:]]
    buckets += [[] for _ in range(num_ranks if not buckets else -len(buckets) % num_ranks)]
    each_work = [bucket_work(bucket) for bucket in buckets]
    ranks = most_even_rounds(each_work, num_ranks)
    computed = [len(bucket) * max((lengths[index] for index in bucket), default=0) for bucket in buckets]
    plan = PackingPlan(
        micro_batches=tuple(tuple(tuple(sorted(buckets[number])) for number in rank) for rank in ranks),
        work=tuple(tuple(each_work[number] for number in rank) for rank in ranks),
        num_tokens=sum(lengths),
        capacity=sum(max(max_tokens, tokens) for tokens in computed),
        one_batch_tokens=len(lengths) * max(lengths, default=0),
        num_padding_tokens=sum(computed) - sum(lengths),
        is_padded=True,
    )
    return [Piece(members=(index,), num_tokens=length) for index, length in enumerate(lengths)], plan


def _buckets(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest first; a new bucket where the next would be too short for it, or too much."""
    buckets: list[list[int]] = []
    for index in heaviest_first(lengths):
        longest = lengths[buckets[-1][0]] if buckets else 0
        is_like = longest - lengths[index] <= SPREAD * longest
        if buckets and is_like and (len(buckets[-1]) + 1) * longest <= max_tokens:
            buckets[-1].append(index)
        else:
            buckets.append([index])
    return buckets
