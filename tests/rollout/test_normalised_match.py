import json

import pytest

from towline.rollout.rewards.normalised_match import grade, normalised
from towline.storage.errors import DataError


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("The Beatles", "beatles"),
        ("king of the Franks", "King of Franks"),
        ("an apple", "Apple."),
        ("U.S.", "US"),
        ("St. Louis", "St Louis"),
        ("O'Brien", "O\u2019Brien"),
        ("Jean-Luc Picard", "jean luc  picard"),
        ("well\u2013known", "well-known"),
        ("COVID-19", "Covid 19"),
        ("Paris, France", "paris\nfrance"),
        ("1,234,567", "1234567"),
        ("1914\u20131918", "1914 - 1918"),
        ("\u22125", "-5"),
        ("AC/DC", "ac/dc"),
        ("Stra\u00dfe", "STRASSE"),
        ("caf\u00e9", "cafe\u0301"),
        ("\uff21\uff22\uff23 \u2168", "abc ix"),
        ("\u00bd", "1/2"),
        ("co\u00adoperate", "coope\u200brate"),
        ("5%", r"5\%"),
        ("Vitamin A", r"\text{Vitamin A}"),
        ("A", "a"),
        ("The The", "the the"),
        ("\u201cHamlet\u201d", '"hamlet"'),
    ],
)
def test_writing_does_not_matter(gold: str, answer: str) -> None:
    assert grade(f"\\boxed{{{answer}}}", gold).value == 1.0
    assert grade(f"<think>\\boxed{{no}}</think> {answer}", gold).value == 1.0


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("3.14", "314"),
        (".5", "5"),
        ("-5", "5"),
        ("1/2", "12"),
        ("10:30", "1030"),
        ("1914-1918", "19141918"),
        ("1,5", "15"),
        ("1,2345", "12345"),
        ("5'10", "510"),
        ("102", "10\u00b2"),
        ("11/2", "1\u00bd"),
        ("C#", "C"),
        ("C++", "C"),
        ("Vitamin A", "vitamin"),
        ("A", ""),
        ("A", "the"),
        ("Paris", "Paris or London"),
        ("Paris", "It is Paris"),
        ("caf\u00e9", "cafe"),
        ("3", "3.0"),
        ("5%", "5"),
    ],
)
def test_what_is_written_does(gold: str, answer: str) -> None:
    assert grade(f"\\boxed{{{answer}}}", gold).value == 0.0
    assert grade(f"\\boxed{{{gold}}}", json.dumps([answer or "other"])).value == 0.0


@pytest.mark.parametrize(
    ("gold", "completion", "value"),
    [
        ('["Myanmar", "Burma"]', r"\boxed{burma}", 1.0),
        ('["Myanmar", "Burma"]', r"\boxed{Myanmar, Burma}", 0.0),
        ("[1914, 3.0]", "1914", 1.0),
        ("[1914, 3.0]", "3.0", 1.0),
        ("[sic", "[sic", 1.0),
        ("4", r"\boxed{4} and \boxed{5}", 0.0),
        ("4", r"<think>4", 0.0),
        ("4", r"<think>4</think>", 0.0),
        ("4", r"4 \boxed{", 0.0),
        ("4", "", 0.0),
    ],
)
def test_any_of_several_gold_answers_will_do_and_only_the_final_answer_counts(
    gold: str, completion: str, value: float
) -> None:
    assert grade(completion, gold).value == value


@pytest.mark.parametrize("gold", ["", " ", ".", '["a", ""]', "[]", '[["a"]]', "[true]", "[null]"])
def test_a_gold_answer_that_is_none_is_an_error_in_the_data(gold: str) -> None:
    with pytest.raises(DataError, match="gold answer"):
        grade("a", gold)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece",
    [
        "\\text{",
        "1,111,",
        "1 -",
        " ",
        "the ",
        "\\boxed{",
        "\\boxed{a}",
        "\ufdfa",
        "a ",
        "<think>",
        ".",
        "[",
        "-",
        "\ud800",
    ],
)
def test_a_megabyte_of_anything_is_soon_judged(piece: str) -> None:
    assert grade("x" + piece * (1_000_000 // len(piece)), "4").value == 0.0
    assert normalised("1" + piece * (100_000 // len(piece)))
