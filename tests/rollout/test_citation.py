import pytest

from towline.rollout.rewards.citation import grade
from towline.storage.errors import DataError

NUMBERS, DOCUMENTS, KEYS = "[1, 2, 3]", '["doc-1", "doc-2"]', '["smith2020", "wu_1999"]'


@pytest.mark.parametrize(
    ("gold", "completion", "value"),
    [
        (NUMBERS, "Water boils at 100 degrees [1].", 1.0),
        (NUMBERS, "Water boils[1] and freezes[2][3].", 1.0),
        (NUMBERS, "Both say so [1, 3; 2].", 1.0),
        (NUMBERS, "All say so [1-3] [2\u20133].", 1.0),
        (NUMBERS, "A footnote [^2].", 1.0),
        (NUMBERS, "Water boils.", 0.0),
        (NUMBERS, "Water boils [4].", 0.0),
        (NUMBERS, "Water boils [1], and freezes [4].", 0.0),
        (NUMBERS, "All say so [1-4].", 0.0),
        (NUMBERS, "All say so [1-999999999].", 0.0),
        (NUMBERS, "Backwards [3-1], [9-1].", 0.0),
        (NUMBERS, "It boils [1] [sic], in a list [x, y].", 1.0),
        (NUMBERS, "[1, see above]", 0.0),
        (NUMBERS, "[] [,] [", 0.0),
        (NUMBERS, "source 1 says (1) so", 0.0),
        (NUMBERS, "<think>[9] or [1]?</think> By [2].", 1.0),
        (NUMBERS, "<think>by [1]</think> Yes.", 0.0),
        (NUMBERS, "<think>by [1]", 0.0),
        (DOCUMENTS, "It boils [doc-2].", 1.0),
        (DOCUMENTS, "It boils [doc-1, doc-2] [1].", 1.0),
        (DOCUMENTS, "It boils [doc-1] [doc-9].", 0.0),
        (DOCUMENTS, "It boils [note].", 0.0),
        (KEYS, r"It boils \cite{smith2020}.", 1.0),
        (KEYS, r"It boils \citep[see][p. 3]{smith2020, wu_1999}.", 1.0),
        (KEYS, r"It boils \textcite*{smith2020}.", 1.0),
        (KEYS, r"It boils \cite{smith2020,jones}.", 0.0),
        (KEYS, r"It boils \cite{}.", 0.0),
        (KEYS, "It boils [smith2020].", 1.0),
        (KEYS, "It boils [smith2020] [jones2021].", 0.0),
        ('{"sources": [1, 2, 3], "required": [2]}', "By [2] and [3].", 1.0),
        ('{"sources": [1, 2, 3], "required": [2]}', "By [1].", 0.0),
        ('{"sources": [1, 2, 3], "required": []}', "By [1].", 1.0),
        ('{"sources": [1, 2, 3]}', "Nobody.", 0.0),
    ],
)
def test_sources_that_exist_are_cited_and_no_others(gold: str, completion: str, value: float) -> None:
    assert grade(completion, gold).value == value


def test_a_refusal_says_why() -> None:
    assert grade("By [4].", NUMBERS).detail == "cites 4, which is no source"
    assert grade("By nobody.", NUMBERS).detail == "cites nothing"
    assert grade("[1]", '{"sources": [1, 2, 3], "required": [2, 3]}').detail == "does not cite 2, 3"


@pytest.mark.parametrize(
    "gold",
    ["", "doc-1", "[]", "{}", '[""]', "[1.5]", "[true]", "[[1]]", "7", '{"sources": [1], "requird": [1]}',
     '{"sources": [1], "required": 1}', '{"sources": [1], "required": [2]}', "[" * 100_000],
)  # fmt: skip
def test_a_gold_answer_that_lists_no_sources_is_an_error_in_the_data(gold: str) -> None:
    with pytest.raises(DataError, match="gold answer"):
        grade("By [1].", gold)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece", ["[", "[1", "[1-3]", "[1-9999]", "\\cite", "\\cite{", "\\cite[", "[1,", "]", "<think>"]
)
def test_a_megabyte_of_anything_is_soon_judged(piece: str) -> None:
    assert grade(piece * (1_000_000 // len(piece)), NUMBERS).value in (0.0, 1.0)
