"""Sets of real numbers as disjoint pieces in order: intervals, points, their unions, intersections and differences."""

from dataclasses import dataclass
from functools import cmp_to_key

from towline.rollout.rewards.mathematics.equality import order, same_value
from towline.rollout.rewards.mathematics.expression import INFINITY, MINUS_INFINITY, Expression
from towline.rollout.rewards.mathematics.work import Work


@dataclass(frozen=True, slots=True)
class Piece:
    low: Expression
    high: Expression
    has_low: bool
    has_high: bool


RealSet = list[Piece]
REALS: RealSet = [Piece(MINUS_INFINITY, INFINITY, False, False)]


def interval(low: Expression, high: Expression, has_low: bool, has_high: bool, work: Work) -> RealSet:
    ordering = order(low, high, work)
    if ordering > 0 or (ordering == 0 and not (has_low and has_high)):
        return []
    return [Piece(low, high, has_low and low != MINUS_INFINITY, has_high and high != INFINITY)]


def union(sets: list[RealSet], work: Work) -> RealSet:
    pieces = [piece for pieces in sets for piece in pieces]
    pieces.sort(key=cmp_to_key(lambda a, b: order(a.low, b.low, work) or b.has_low - a.has_low))
    merged: RealSet = []
    for piece in pieces:
        if merged and _touch(merged[-1], piece, work):
            merged[-1] = _joined(merged[-1], piece, work)
        else:
            merged.append(piece)
    return merged


def _touch(left: Piece, right: Piece, work: Work) -> bool:
    gap = order(right.low, left.high, work)
    return gap < 0 or (gap == 0 and (left.has_high or right.has_low))


def _joined(left: Piece, right: Piece, work: Work) -> Piece:
    ordering = order(left.high, right.high, work)
    high, has_high = (left.high, left.has_high) if ordering > 0 else (right.high, right.has_high)
    return Piece(left.low, high, left.has_low, has_high or (ordering == 0 and left.has_high))


def complement(pieces: RealSet, work: Work) -> RealSet:
    gaps: RealSet = []
    low, has_low = MINUS_INFINITY, False
    for piece in pieces:
        gaps += interval(low, piece.low, has_low, not piece.has_low and piece.low != MINUS_INFINITY, work)
        low, has_low = piece.high, not piece.has_high
    if low != INFINITY:
        gaps += interval(low, INFINITY, has_low, False, work)
    return gaps


def intersection(sets: list[RealSet], work: Work) -> RealSet:
    return complement(union([complement(pieces, work) for pieces in sets], work), work)


def same_set(left: RealSet, right: RealSet, work: Work) -> bool:
    return len(left) == len(right) and all(
        (a.has_low, a.has_high) == (b.has_low, b.has_high)
        and _same_end(a.low, b.low, work)
        and _same_end(a.high, b.high, work)
        for a, b in zip(left, right, strict=True)
    )


def _same_end(left: Expression, right: Expression, work: Work) -> bool:
    if {left, right} & {INFINITY, MINUS_INFINITY}:
        return left == right
    return same_value(left, right, work)
