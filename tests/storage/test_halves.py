"""Halves of pairs: disjoint by prompt, together everything, and the same whatever else a dataset holds."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from towline.storage.errors import DataError
from towline.storage.example_config import Half, PreferenceData
from towline.storage.examples import load_preferences, survey_preferences
from towline.storage.halves import HalfCount, count_halves, half_of
from towline.storage.records import Preference, Turn

HALVES: tuple[Half, ...] = get_args(Half)
NUM_PROMPTS = 1000
EIGHT = ["first", "first", "second", "first", "first", "first", "first", "first"]
"""Halves of p0 to p7 with the seed 0."""


def turns(text: str) -> tuple[Turn, ...]:
    return (Turn(role="user", content=text),)


@pytest.fixture
def pairs() -> list[dict[str, str]]:
    """Two pairs of each prompt, far from each other."""
    return [row(prompt, chosen) for chosen in "ac" for prompt in range(NUM_PROMPTS)]


def row(prompt: int, chosen: str = "a") -> dict[str, str]:
    return {"prompt": f"p{prompt}", "chosen": chosen, "rejected": "b"}


def load(folder: Path, rows: list[dict[str, str]], half: Half | None = None, **values: Any) -> list[Preference]:
    path = jsonl(folder, rows)
    return list(load_preferences(PreferenceData(train=str(path), half=half, **values)).rows)


def jsonl(folder: Path, rows: list[dict[str, str]]) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(pairs: list[Preference]) -> set[str]:
    return {pair.prompt[0].content for pair in pairs}


def test_halves_share_no_prompt_and_are_together_everything(tmp_path: Path, pairs: list[dict[str, str]]) -> None:
    first, second = (load(tmp_path, pairs, half) for half in HALVES)
    assert not prompts(first) & prompts(second)
    assert sorted(first + second, key=lambda pair: pair.row) == load(tmp_path, pairs)
    # Both pairs of a prompt are in its half, in the order and with the numbers of the rows.
    assert len(first) == 2 * len(prompts(first))
    assert [pair.row for pair in first] == sorted(pair.row for pair in first)
    # 1,000 fair coins: five standard deviations are 79.
    assert abs(len(prompts(first)) - NUM_PROMPTS / 2) < 79


def test_neither_order_nor_other_rows_move_a_prompt(tmp_path: Path, pairs: list[dict[str, str]]) -> None:
    first = prompts(load(tmp_path, pairs, "first"))
    assert prompts(load(tmp_path, pairs[::-1], "first")) == first
    few = [row for row in pairs if int(row["prompt"][1:]) < 100]
    assert prompts(load(tmp_path, few, "first")) == {one for one in first if int(one[1:]) < 100}


def test_another_seed_makes_other_halves(tmp_path: Path, pairs: list[dict[str, str]]) -> None:
    halves = [prompts(load(tmp_path, pairs, "first", half_seed=seed)) for seed in (0, 1, 2)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        # As many stay as two coins agree.
        assert abs(len(halves[one] & halves[other]) - NUM_PROMPTS / 4) < 70


def test_a_half_is_that_of_every_other_machine_and_day() -> None:
    """Other ones here would let a watcher that is trained later see what the first model has seen."""
    assert [half_of(turns(f"p{number}"), 0) for number in range(8)] == EIGHT
    assert [half_of(turns(f"p{number}"), 1) for number in range(8)] != EIGHT


def test_who_said_what_is_part_of_a_prompt() -> None:
    said = [(Turn(role="system", content="a"), Turn(role="user", content=f"b{number}")) for number in range(40)]
    other = [(Turn(role="user", content="a"), Turn(role="user", content=f"b{number}")) for number in range(40)]
    assert [half_of(one, 0) for one in said] != [half_of(one, 0) for one in other]


def test_pairs_and_prompts_of_each_half_are_counted() -> None:
    pairs = [
        Preference(row=row, prompt=turns(prompt), chosen="a", rejected="b", margin=None)
        for row, prompt in enumerate(["p0", "p2", "p0"])
    ]
    assert count_halves(pairs, 0) == [
        HalfCount(half="first", num_pairs=2, num_prompts=1),
        HalfCount(half="second", num_pairs=1, num_prompts=1),
    ]
    assert count_halves(pairs[1:2], 0)[0] == HalfCount(half="first", num_pairs=0, num_prompts=0)


def test_report_and_digest_are_of_the_half(tmp_path: Path) -> None:
    path = jsonl(tmp_path, [row(0), row(2), row(2), {"prompt": "p0", "chosen": "a"}])
    one, other = (survey_preferences(PreferenceData(train=str(path), half=half)) for half in HALVES)
    assert (one.half, one.report.num_rows, one.report.num_duplicates) == ("first", 1, 0)
    assert (other.half, other.report.num_rows, other.report.num_duplicates) == ("second", 2, 1)
    # A row that makes no pair has no prompt to go by.
    assert one.report.num_rejected == other.report.num_rejected == 1
    assert one.digest != other.digest


def test_a_half_without_a_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all of its 1 pairs are in the other half"):
        load(tmp_path, [row(2)], "first")
