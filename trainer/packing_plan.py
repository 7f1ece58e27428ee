"""Which completions are computed together: pieces of groups, and the micro-batches of the ranks. Plain Python.

A prompt is computed once for all completions of its piece, so a piece is a whole group wherever that fits.

Example:
    pieces = cut_into_pieces(prompts, completions, groups, num_ranks=size, max_tokens=4096, shares_prompts=True)
    plan = plan_packing([piece.num_tokens for piece in pieces], num_ranks=size, max_tokens=4096)
    for numbers in plan.micro_batches[rank]:                                # the same number on every rank
        batch = pack_pieces([[sequences[index] for index in pieces[number].members] for number in numbers])
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    members: tuple[int, ...]
    """Indices of sequences with one prompt, by length of their completion, then index."""
    num_tokens: int
    """The prompt once and each completion: what is computed."""


def cut_into_pieces(
    num_prompt_tokens: Sequence[int],
    num_completion_tokens: Sequence[int],
    groups: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    shares_prompts: bool,
) -> list[Piece]:
    """Cut groups until each piece keeps the budget and there is one for each rank; each cut repeats a prompt.

    The same answer on every rank. A completion that is over the budget with its prompt is a piece of its own, and there
    are fewer pieces than ranks only if there are fewer completions.

    Args:
        num_prompt_tokens, num_completion_tokens, groups: of each sequence, by index; sequences of one group have one
            prompt.
        max_tokens: budget of a micro-batch.
        shares_prompts: false where the attention cannot do it: then every completion is a piece.
    """
    members: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)

    def cut(group: int, num_pieces: int) -> list[Piece]:
        indices = members[group]
        parts = _even_spread([num_completion_tokens[index] for index in indices], None, num_pieces)
        assert parts is not None
        return [_piece([indices[place] for place in part], num_prompt_tokens, num_completion_tokens) for part in parts]

    cuts: dict[int, list[Piece]] = {}
    for group, indices in members.items():
        fewest = 1 if shares_prompts else len(indices)
        candidates = (cut(group, num_pieces) for num_pieces in range(fewest, len(indices) + 1))
        cuts[group] = next(
            pieces for pieces in candidates if _largest(pieces) <= max_tokens or len(pieces) == len(indices)
        )
    while sum(map(len, cuts.values())) < num_ranks:
        divisible = [group for group, pieces in cuts.items() if len(pieces) < len(members[group])]
        if not divisible:
            break
        # `max` takes the first of equals.
        group = max(divisible, key=lambda group: _largest(cuts[group]))
        cuts[group] = cut(group, len(cuts[group]) + 1)
    return [piece for pieces in cuts.values() for piece in pieces]


def _piece(indices: list[int], num_prompt_tokens: Sequence[int], num_completion_tokens: Sequence[int]) -> Piece:
    ordered = sorted(indices, key=lambda index: (num_completion_tokens[index], index))
    num_tokens = num_prompt_tokens[ordered[0]] + sum(num_completion_tokens[index] for index in ordered)
    return Piece(members=tuple(ordered), num_tokens=num_tokens)


def _largest(pieces: list[Piece]) -> int:
    return max(piece.num_tokens for piece in pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """[rank][m] → numbers of the pieces, by tokens, then number; () where there is nothing left for that rank. All
    ranks have as many: each walks the same collectives."""
    fill: float
    """Tokens over capacity of all micro-batches, empty ones too: 1 wastes nothing."""
    rank_balance: float
    """Tokens of the average rank over those of the fullest: 1 leaves nobody waiting."""


def plan_packing(num_tokens: Sequence[int], *, num_ranks: int, max_tokens: int) -> PackingPlan:
    """Spread pieces over ranks and micro-batches; the same answer on every rank, ties broken by number.

    Best fit, longest first, says how many micro-batches are needed. That number is rounded up to a multiple of the
    ranks, and if the pieces can be spread evenly over so many, they are: micro-batches that run at the same time
    should take the same time.

    Args:
        num_tokens: of each piece, by number.
        max_tokens: budget of a micro-batch. A longer piece gets a micro-batch of its own.
    """
    bins = _best_fit(num_tokens, max_tokens)
    num_micro_batches = max(1, -(-len(bins) // num_ranks))
    bins = _even_spread(num_tokens, max_tokens, num_micro_batches * num_ranks) or bins
    bins += [[] for _ in range(num_micro_batches * num_ranks - len(bins))]
    ranks = _deal(bins, num_tokens, num_ranks)

    rank_tokens = [sum(num_tokens[index] for indices in rank for index in indices) for rank in ranks]
    capacity = sum(max(max_tokens, sum(num_tokens[index] for index in indices)) for indices in bins)
    return PackingPlan(
        micro_batches=tuple(
            # Neighbours of one length share an attention call.
            tuple(tuple(sorted(indices, key=lambda index: (num_tokens[index], index))) for indices in rank)
            for rank in ranks
        ),
        fill=sum(rank_tokens) / capacity,
        rank_balance=sum(rank_tokens) / (num_ranks * max(rank_tokens)) if any(rank_tokens) else 1.0,
    )


def _longest_first(num_tokens: Sequence[int]) -> list[int]:
    return sorted(range(len(num_tokens)), key=lambda index: (-num_tokens[index], index))


def _best_fit(num_tokens: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Put each piece where it leaves the least room, or into a new micro-batch."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in _longest_first(num_tokens):
        fitting = [number for number in range(len(bins)) if room[number] >= num_tokens[index]]
        if not fitting:
            bins.append([])
            room.append(max_tokens)
            fitting = [len(bins) - 1]
        best = min(fitting, key=lambda number: (room[number], number))
        bins[best].append(index)
        room[best] -= num_tokens[index]
    return bins


def _even_spread(num_tokens: Sequence[int], max_tokens: int | None, num_bins: int) -> list[list[int]] | None:
    """Put each piece into the emptiest bin, of equals into the one with fewest; None if that breaks the budget."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    load = [0] * num_bins
    for index in _longest_first(num_tokens):
        emptiest = min(range(num_bins), key=lambda number: (load[number], len(bins[number]), number))
        if max_tokens is not None and bins[emptiest] and load[emptiest] + num_tokens[index] > max_tokens:
            return None
        bins[emptiest].append(index)
        load[emptiest] += num_tokens[index]
    return bins


def _deal(bins: list[list[int]], num_tokens: Sequence[int], num_ranks: int) -> list[list[list[int]]]:
    """Give micro-batches of like size to the ranks in rounds, in each round the largest to the rank with least."""
    size = [sum(num_tokens[index] for index in indices) for indices in bins]
    order = sorted(range(len(bins)), key=lambda number: (-size[number], number))
    ranks: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    load = [0] * num_ranks
    for start in range(0, len(order), num_ranks):
        poorest_first = sorted(range(num_ranks), key=lambda rank: (load[rank], rank))
        for rank, number in zip(poorest_first, order[start : start + num_ranks], strict=True):
            ranks[rank].append(bins[number])
            load[rank] += size[number]
    return ranks
