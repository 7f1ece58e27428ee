"""Which completions are computed together: pieces of groups, and the micro-batches of the ranks. Plain Python.

A prompt is computed once for all completions of its piece, so a piece is a whole group wherever that fits.
`packing_step.plan_step` tries several cuts and takes the best; this file makes one of them.

Example:
    pieces = cut_into_pieces(prompts, completions, groups, num_ranks=size, max_tokens=4096, shares_prompts=True)
    plan = plan_packing([piece.num_tokens for piece in pieces], num_ranks=size, max_tokens=4096)
    for numbers in plan.micro_batches[rank]:                                # the same number on every rank
        batch = pack_pieces([[sequences[index] for index in pieces[number].members] for number in numbers])
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from towline.trainer.packing_partition import best_fit, heaviest_first, most_even, most_even_rounds


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

    def as_pieces(indices: list[int], parts: list[list[int]]) -> list[Piece]:
        return [_piece([indices[place] for place in part], num_prompt_tokens, num_completion_tokens) for part in parts]

    def cut_evenly(group: int, num_pieces: int) -> list[Piece]:
        indices = members[group]
        return as_pieces(indices, _dealt([num_completion_tokens[index] for index in indices], num_pieces))

    cuts: dict[int, list[Piece]] = {}
    for group, indices in members.items():
        if not shares_prompts:
            cuts[group] = cut_evenly(group, len(indices))
            continue
        # Full pieces and a rest that others can be put beside: even ones of 2/3 of the budget would leave 1/3 empty.
        room = max_tokens - num_prompt_tokens[indices[0]]
        cuts[group] = as_pieces(indices, best_fit([num_completion_tokens[index] for index in indices], room))
    while sum(map(len, cuts.values())) < num_ranks:
        divisible = [group for group, pieces in cuts.items() if len(pieces) < len(members[group])]
        if not divisible:
            break
        # `max` takes the first of equals.
        group = max(divisible, key=lambda group: _largest(cuts[group]))
        cuts[group] = cut_evenly(group, len(cuts[group]) + 1)
    return [piece for pieces in cuts.values() for piece in pieces]


def _piece(indices: list[int], num_prompt_tokens: Sequence[int], num_completion_tokens: Sequence[int]) -> Piece:
    ordered = sorted(indices, key=lambda index: (num_completion_tokens[index], index))
    num_tokens = num_prompt_tokens[ordered[0]] + sum(num_completion_tokens[index] for index in ordered)
    return Piece(members=tuple(ordered), num_tokens=num_tokens)


def _dealt(weights: Sequence[int], num_parts: int) -> list[list[int]]:
    """Put each into the lightest part, of equals into the one with fewest: no part is left without any."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    load = [0] * num_parts
    for index in heaviest_first(weights):
        lightest = min(range(num_parts), key=lambda number: (load[number], len(parts[number]), number))
        parts[lightest].append(index)
        load[lightest] += weights[index]
    return parts


def _largest(pieces: list[Piece]) -> int:
    return max(piece.num_tokens for piece in pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingPlan:
    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """[rank][m] → numbers of the pieces, by tokens, then number; () where there is nothing left for that rank. All
    ranks have as many: each walks the same collectives."""
    work: tuple[tuple[int, ...], ...]
    """[rank][m], estimated operations (`packing_work`), or tokens where no others were given."""
    num_tokens: int
    """Of all pieces, padding not counted."""
    capacity: int
    """Tokens that all micro-batches may hold, empty ones too; one over the budget counts as full."""
    one_batch_tokens: int
    """Tokens of one padded batch of all sequences: their number times the longest."""
    num_padding_tokens: int = 0
    """Computed for nothing: see `packing_buckets`."""
    is_padded: bool = False
    """Micro-batches are rows of one length (`packing_rows.pad_rows`), not pieces end to end (`packing.pack_pieces`)."""

    @property
    def fill(self) -> float:
        """Tokens over capacity: 1 wastes no room."""
        return self.num_tokens / self.capacity

    @property
    def padding(self) -> float:
        """Share of the computed tokens that is padding; 0 for packed ones."""
        return self.num_padding_tokens / max(1, self.num_tokens + self.num_padding_tokens)

    @property
    def padding_saved(self) -> float:
        """Share of the tokens of one padded batch that is not computed, padding and shared prompts."""
        return 1 - (self.num_tokens + self.num_padding_tokens) / max(1, self.one_batch_tokens)

    @property
    def rank_imbalance(self) -> float:
        """(max - mean) / mean of the work of a rank: what the slowest adds where ranks wait once a step (ZeRO 0, 1)."""
        return _excess(self.work)

    @property
    def moment_imbalance(self) -> float:
        """The same, where ranks wait for each other in every micro-batch (ZeRO 2, 3)."""
        slowest = self.slowest_work
        mean = sum(map(sum, self.work)) / len(self.work)
        return slowest / mean - 1 if mean else 0.0

    @property
    def slowest_work(self) -> int:
        """Work of the slowest rank of each moment, added up."""
        return sum(max(moment) for moment in zip(*self.work, strict=True))


def plan_packing(
    num_tokens: Sequence[int],
    *,
    num_ranks: int,
    max_tokens: int,
    work: Sequence[int] | None = None,
    one_batch_tokens: int | None = None,
) -> PackingPlan:
    """Spread pieces over ranks and micro-batches; the same answer on every rank, ties broken by number.

    Best fit, longest first, says how many micro-batches are needed; that number is rounded up to a multiple of the
    ranks. Of several ways to fill so many, all within the budget, the one is taken whose ranks have like work, and
    among those within `EVEN_ENOUGH` the one that is fastest where ranks wait in every micro-batch.

    Args:
        num_tokens: of each piece, by number.
        max_tokens: budget of a micro-batch. A longer piece gets a micro-batch of its own.
        work: of each piece, `packing_work.WorkModel.piece`; by default its tokens.
        one_batch_tokens: see `PackingPlan`; by default every piece is taken for a sequence.
    """
    weights = num_tokens if work is None else work
    fewest = best_fit(num_tokens, max_tokens)
    num_micro_batches = max(1, -(-len(fewest) // num_ranks))
    candidates = [
        _sums(ranks, weights)
        for ranks in _spreads(num_tokens, weights, fewest, num_ranks, num_micro_batches, max_tokens)
    ]
    ranks, rank_work = min(candidates, key=lambda candidate: _badness(candidate[1]))
    in_micro_batches = [_total(indices, num_tokens) for rank in ranks for indices in rank]
    return PackingPlan(
        micro_batches=tuple(
            # Neighbours of one length share an attention call.
            tuple(tuple(sorted(indices, key=lambda index: (num_tokens[index], index))) for indices in rank)
            for rank in ranks
        ),
        work=rank_work,
        num_tokens=sum(num_tokens),
        capacity=sum(max(max_tokens, tokens) for tokens in in_micro_batches),
        one_batch_tokens=(
            len(num_tokens) * max(num_tokens, default=0) if one_batch_tokens is None else one_batch_tokens
        ),
    )


EVEN_ENOUGH = 0.005
"""Of `PackingPlan.rank_imbalance`: less than a step's time varies by itself."""

_Ranks = list[list[list[int]]]
"""[rank][m] → numbers of the pieces."""


def _spreads(
    num_tokens: Sequence[int],
    weights: Sequence[int],
    fewest: list[list[int]],
    num_ranks: int,
    num_micro_batches: int,
    max_tokens: int,
) -> Iterator[_Ranks]:
    """Ways to fill the micro-batches, each of which keeps the budget. The first always exists."""
    num_bins = num_ranks * num_micro_batches

    def fits(parts: list[list[int]]) -> bool:
        return all(len(part) <= 1 or _total(part, num_tokens) <= max_tokens for part in parts)

    def filled(members: list[int], num_parts: int) -> Iterator[list[list[int]]]:
        """Like work, else like tokens, else as full as can be."""
        for each in (weights, num_tokens):
            yield [[members[place] for place in part] for part in most_even([each[i] for i in members], num_parts)]
        parts = best_fit([num_tokens[index] for index in members], max_tokens)
        if len(parts) <= num_parts:
            yield [[members[place] for place in part] for part in parts] + [[] for _ in range(num_parts - len(parts))]

    def dealt(bins: list[list[int]]) -> _Ranks:
        rounds = most_even_rounds([_total(indices, weights) for indices in bins], num_ranks)
        return [[bins[number] for number in rank] for rank in rounds]

    # Micro-batches first, then their ranks.
    yield dealt(fewest + [[] for _ in range(num_bins - len(fewest))])
    for bins in filled(list(range(len(num_tokens))), num_bins):
        if fits(bins):
            yield dealt(bins)
    # Ranks first, then their micro-batches: even ranks whatever the micro-batches are.
    ranks: _Ranks = []
    for members in most_even(weights, num_ranks):
        parts = next(filter(fits, filled(sorted(members), num_micro_batches)), None)
        if parts is None:
            return
        ranks.append(sorted(parts, key=lambda indices: -_total(indices, weights)))
    yield ranks


def _sums(ranks: _Ranks, weights: Sequence[int]) -> tuple[_Ranks, tuple[tuple[int, ...], ...]]:
    return ranks, tuple(tuple(_total(indices, weights) for indices in rank) for rank in ranks)


def _badness(work: tuple[tuple[int, ...], ...]) -> tuple[float, int, int]:
    slowest = sum(max(moment) for moment in zip(*work, strict=True))
    # Where one piece decides the time, the others still are to be spread.
    return max(EVEN_ENOUGH, _excess(work)), slowest, sum(each**2 for rank in work for each in rank)


def _excess(work: tuple[tuple[int, ...], ...]) -> float:
    ranks = [sum(rank) for rank in work]
    return max(ranks) * len(ranks) / sum(ranks) - 1 if any(ranks) else 0.0


def _total(indices: Sequence[int], values: Sequence[int]) -> int:
    return sum(values[index] for index in indices)
