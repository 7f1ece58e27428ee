"""Whether two answers are one: by the kinds that they are of, then by their values."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeGuard

from towline.rollout.rewards.mathematics.answers import (
    Answer,
    Assignment,
    Bounds,
    Equation,
    Inequality,
    Matrix,
    Members,
    NotRead,
    Ratio,
    Region,
    Steps,
    Value,
    Words,
)  # fmt: skip
from towline.rollout.rewards.mathematics.equality import has_value, same_up_to_factor, same_value
from towline.rollout.rewards.mathematics.expression import (
    Apply,
    Expression,
    Number,
    Undefined,
    difference,
)  # fmt: skip
from towline.rollout.rewards.mathematics.reading import read
from towline.rollout.rewards.mathematics.real_sets import (
    REALS,
    RealSet,
    complement,
    intersection,
    interval,
    same_set,
    union,
)  # fmt: skip
from towline.rollout.rewards.mathematics.work import TooCostly, Work

MAX_RESTATED = 20


@dataclass(frozen=True, slots=True)
class Comparison:
    is_equal: bool | None
    reason: str = ""
    """Why it cannot be told, when `is_equal` is None."""


def compare(left: str, right: str) -> Comparison:
    """Compare two answers; the order does not matter. Two that differ in every reading are different."""
    if left.strip() == right.strip() and left.strip():
        return Comparison(True)
    reasons: list[str] = []
    for one in read(left):
        for other in read(right):
            try:
                if _same(one, other, Work()):
                    return Comparison(True)
            except (TooCostly, Undefined) as error:
                if _can_be_told(one) == _can_be_told(other):
                    reasons.append(str(error))
    return Comparison(None, reasons[0]) if reasons else Comparison(False)


def _can_be_told(answer: Answer) -> bool:
    """Whether an answer has a value within the bounds. One that has is not equal to one that has not."""
    work = Work()
    try:
        return all(has_value(expression, work) for expression in _expressions(answer))
    except TooCostly:
        return False


def _expressions(answer: Answer) -> list[Expression]:
    match answer:
        case Value(expression=expression):
            return [expression]
        case Members(members=parts) | Region(parts=parts):
            return [expression for part in parts for expression in _expressions(part)]
        case Bounds(low=low, high=high):
            return [low, high]
        case Inequality(difference=expression):
            return [expression]
        case Equation(left=left, right=right):
            return [left, right]
        case Assignment(value=value):
            return _expressions(value)
        case Ratio(terms=terms):
            return list(terms)
        case Matrix(rows=rows):
            return [cell for row in rows for cell in row]
        case _:
            return []


def _same(left: Answer, right: Answer, work: Work) -> bool:
    if isinstance(left, NotRead) or isinstance(right, NotRead):
        return _same_unread(left, right)
    if left == right:
        return True
    if isinstance(left, Assignment) or isinstance(right, Assignment):
        return _same_assignment(left, right, work)
    if isinstance(left, Bounds | Region) or isinstance(right, Bounds | Region):
        return _same_region(left, right, work)
    left, right = _lone_member(left, right, work), _lone_member(right, left, work)
    match left, right:
        case Value(), Value():
            return _same_quantity(left, right, work)
        case Words(), Words():
            return left.words == right.words
        case Members(), Members():
            return _same_members(left, right, work)
        case Matrix(), Matrix():
            return _same_matrix(left, right, work)
        case Equation(), Equation():
            return same_up_to_factor(_zero_side(left), _zero_side(right), work, positive=False)
        case Inequality(), Inequality():
            return left.is_strict == right.is_strict and same_up_to_factor(
                left.difference, right.difference, work, positive=True
            )
        case Ratio(), Ratio():
            return _same_ratio(left, right, work)
        case (Ratio() as ratio, Value() as value) | (Value() as value, Ratio() as ratio):
            return (
                ratio.time is None
                and len(ratio.terms) == 2
                and same_value(Apply("/", ratio.terms), value.expression, work)
            )
        case _:
            return False


def _same_unread(left: Answer, right: Answer) -> bool:
    if not isinstance(left, NotRead) or not isinstance(right, NotRead):
        return False
    if left.text and left.text == right.text:
        return True
    raise TooCostly(f"neither can be read: {left.reason}; {right.reason}")


def _lone_member(answer: Answer, other: Answer, work: Work) -> Answer:
    """A set or list of one member, or of one value in several forms, is that value beside an answer that is no list."""
    if not _is_unordered(answer) or _is_unordered(other) or not 1 <= len(answer.members) <= MAX_RESTATED:
        return answer
    first, *rest = answer.members
    return first if all(_same(first, member, work) for member in rest) else answer


def _assigns_each(answer: Members) -> bool:
    """`x = 1, y = 2`, which says as much as (1, 2) or, in this order, 1, 2."""
    names = {member.name for member in answer.members if isinstance(member, Assignment)}
    return len(names) == len(answer.members) > 1


def _is_python_list(answer: Members) -> bool:
    """`[1, 2, 3]`; two members in square brackets are an interval."""
    return (answer.opening, answer.closing) == ("[", "]") and len(answer.members) != 2


def _is_unordered(answer: Answer) -> TypeGuard[Members]:
    return isinstance(answer, Members) and answer.opening in ("", "{")


def _same_quantity(left: Value, right: Value, work: Work) -> bool:
    """Equal values; a unit that only one side states is no difference, and of a percentage either reading will do."""
    if left.digits is not None and right.digits is None and same_value(Number(left.digits), right.expression, work):
        return True
    if right.digits is not None and left.digits is None and same_value(left.expression, Number(right.digits), work):
        return True
    one, other = left.expression, right.expression
    if left.unit and right.unit and left.unit.dimension and right.unit.dimension:
        if left.unit.dimension != right.unit.dimension:
            return False
        if left.unit.factor != right.unit.factor:
            one = Apply("*", (Number(left.unit.factor), one))
            other = Apply("*", (Number(right.unit.factor), other))
    if same_value(one, other, work):
        return True
    if left.is_percent == right.is_percent:
        return False
    hundredth = Number(Fraction(1, 100))
    if left.is_percent:
        return same_value(Apply("*", (hundredth, one)), other, work)
    return same_value(one, Apply("*", (hundredth, other)), work)


def _same_members(left: Members, right: Members, work: Work) -> bool:
    if _assigns_each(left) != _assigns_each(right):
        return len(left.members) == len(right.members) and all(
            _same(one, other, work) for one, other in zip(left.members, right.members, strict=True)
        )
    if (_is_python_list(left) and _is_unordered(right)) or (_is_python_list(right) and _is_unordered(left)):
        return _same_unordered(left.members, right.members, work)
    if _is_unordered(left) != _is_unordered(right):
        return False
    if not _is_unordered(left):
        same_brackets = (left.opening, left.closing) == (right.opening, right.closing)
        return (
            (same_brackets or _is_python_list(left) or _is_python_list(right))
            and len(left.members) == len(right.members)
            and all(_same(one, other, work) for one, other in zip(left.members, right.members, strict=True))
        )
    if "{" in (left.opening, right.opening):
        return _covers(left.members, right.members, work) and _covers(right.members, left.members, work)
    return _same_unordered(left.members, right.members, work)


def _same_unordered(left: Sequence[Answer], right: Sequence[Answer], work: Work) -> bool:
    """Lists of the same members, each as often; plain numbers are matched at once, the others by trying."""
    if len(left) != len(right):
        return False
    plain_left, rest_left = _plain_and_rest(left)
    plain_right, rest_right = _plain_and_rest(right)
    if len(rest_left) == len(rest_right):
        if plain_left != plain_right:
            return False
        left, right = rest_left, rest_right
    waiting = list(right)
    for member in left:
        found = next((index for index, other in enumerate(waiting) if _same(member, other, work)), None)
        if found is None:
            return False
        waiting.pop(found)
    return True


def _plain_and_rest(members: Sequence[Answer]) -> tuple[Counter[Fraction], list[Answer]]:
    plain: Counter[Fraction] = Counter()
    rest: list[Answer] = []
    for member in members:
        if isinstance(member, Value) and isinstance(member.expression, Number) and not member.is_percent:
            plain[member.expression.value] += 1
        else:
            rest.append(member)
    return plain, rest


def _covers(outer: Sequence[Answer], inner: Sequence[Answer], work: Work) -> bool:
    return all(any(_same(member, other, work) for other in outer) for member in inner)


def _same_matrix(left: Matrix, right: Matrix, work: Work) -> bool:
    if [len(row) for row in left.rows] != [len(row) for row in right.rows]:
        return False
    pairs = zip(left.rows, right.rows, strict=True)
    return all(same_value(a, b, work) for rows in pairs for a, b in zip(*rows, strict=True))


def _same_ratio(left: Ratio, right: Ratio, work: Work) -> bool:
    if left.time is not None and right.time is not None:
        one, other = left.time.split(), right.time.split()
        return one[0] == other[0] and (len(one) == 1 or len(other) == 1 or one[1] == other[1])
    if len(left.terms) != len(right.terms):
        return False
    (first, *rest), (other_first, *other_rest) = left.terms, right.terms
    return all(
        same_value(Apply("*", (term, other_first)), Apply("*", (other, first)), work)
        for term, other in zip(rest, other_rest, strict=True)
    )


def _zero_side(equation: Equation) -> Expression:
    return difference(equation.left, equation.right)


def _same_assignment(left: Answer, right: Answer, work: Work) -> bool:
    """A name with its value is that value; two names are one, or else the two are equations."""
    if isinstance(left, Assignment) and isinstance(right, Assignment):
        if left.name == right.name:
            return _same(_end(left.value, work), _end(right.value, work), work)
        if left.equation is None or right.equation is None:
            return False
        return _same(left.equation, right.equation, work)
    assignment, other = (left, right) if isinstance(left, Assignment) else (right, left)
    assert isinstance(assignment, Assignment)
    if isinstance(other, Equation):
        return assignment.equation is not None and _same(assignment.equation, other, work)
    return _same(_end(assignment.value, work), other, work)


def _end(answer: Answer, work: Work) -> Answer:
    """The last of `2 + 3 = 5`; of `2 + 3 = 6`, no value at all."""
    if not isinstance(answer, Steps):
        return answer
    *steps, last = answer.values
    return last if all(_same(step, last, work) for step in steps) else Words("")


def _same_region(left: Answer, right: Answer, work: Work) -> bool:
    names = {answer.variable for answer in (left, right) if isinstance(answer, Bounds)}
    if len(names) > 1 or not all(isinstance(answer, Bounds | Region | Members) for answer in (left, right)):
        return False
    sets = [_real_set(answer, work) for answer in (left, right)]
    if sets[0] is None or sets[1] is None:
        return False
    return same_set(sets[0], sets[1], work)


def _real_set(answer: Answer, work: Work) -> RealSet | None:
    """None for an answer that is no set of real numbers."""
    match answer:
        case Bounds(low=low, high=high, has_low=has_low, has_high=has_high):
            return interval(low, high, has_low, has_high, work)
        case Region(connective="reals"):
            return REALS
        case Region(connective=connective, parts=parts):
            sets = [_real_set(part, work) for part in parts]
            known = [pieces for pieces in sets if pieces is not None]
            return _combined(connective, known, work) if len(known) == len(sets) else None
        case Members(opening="{", members=members):
            return _points(members, work)
        case Members((Value(expression=low), Value(expression=high)), opening="(" | "[" as opening, closing=closing):
            return interval(low, high, opening == "[", closing == "]", work)
        case _:
            return None


def _points(members: Sequence[Answer], work: Work) -> RealSet | None:
    values = [member.expression for member in members if isinstance(member, Value)]
    if len(values) < len(members):
        return None
    return union([interval(value, value, True, True, work) for value in values], work)


def _combined(connective: str, sets: list[RealSet], work: Work) -> RealSet | None:
    if connective == "or":
        return union(sets, work)
    if connective == "and":
        return intersection(sets, work)
    if connective == "list":
        return intersection(sets, work) or union(sets, work)
    if connective == "minus":
        return intersection([sets[0], *(complement(pieces, work) for pieces in sets[1:])], work)
    return None
