import math

import pytest

from towline.rollout.rewards.total import Term, total

NAN = math.nan
RIGHT = Term(name="right", weight=1.0)
FORMAT = Term(name="format", weight=0.1, when={"right": 1.0})
STYLE = Term(name="style", weight=-2.0, floor=-0.5)


@pytest.mark.parametrize(
    ("term", "values", "expected"),
    [
        (RIGHT, {"right": 0.5}, 0.5),
        (FORMAT, {"right": 1.0, "format": 1.0}, 0.1),
        (FORMAT, {"right": 1.5, "format": 1.0}, 0.1),
        (FORMAT, {"right": 0.999, "format": 1.0}, 0.0),
        (STYLE, {"style": -0.25}, 0.5),
        (STYLE, {"style": -0.5}, 1.0),
        (STYLE, {"style": -1e300}, 1.0),
        (Term(name="a", weight=1.0, when={"b": 0.5, "c": 0.5}), {"a": 2.0, "b": 0.5, "c": 0.5}, 2.0),
        (Term(name="a", weight=1.0, when={"b": 0.5, "c": 0.5}), {"a": 2.0, "b": 0.5, "c": 0.4}, 0.0),
    ],
)
def test_what_a_part_adds_by_hand(term: Term, values: dict[str, float], expected: float) -> None:
    assert term.contribution(values) == expected


def test_a_condition_looks_at_the_value_and_not_at_what_it_adds() -> None:
    terms = [
        Term(name="gate", weight=0.0, floor=0.9),
        Term(name="chained", weight=1.0, when={"gate": 0.5}),
        Term(name="last", weight=4.0, when={"chained": 1.0}),
    ]
    assert total(terms, {"gate": 0.1, "chained": 1.0, "last": 1.0}) == 4.0


@pytest.mark.parametrize("weight", [1.0, 0.0])
@pytest.mark.parametrize("values", [{"right": NAN, "format": 1.0}, {"right": 0.0, "format": NAN}])
def test_a_part_that_failed_or_whose_condition_did_is_no_zero(weight: float, values: dict[str, float]) -> None:
    term = Term(name="format", weight=weight, when={"right": 1.0})
    assert math.isnan(term.contribution(values))
    assert math.isnan(total([RIGHT, term], values))


def test_the_total_is_the_sum() -> None:
    assert total([RIGHT, FORMAT, STYLE], {"right": 1.0, "format": 1.0, "style": 3.0}) == 1.0 + 0.1 - 6.0
