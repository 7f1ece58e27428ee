import json
from pathlib import Path
from typing import Any

import pytest

from towline.launcher.score.completion_lines import Line, parse_fields, read_lines
from towline.storage.errors import ConfigError, DataError


def read(path: Path, *lines: dict[str, Any], needs_tokens: bool = False, **named: str) -> list[Line]:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_lines(str(path), named, compare=None, needs_tokens=needs_tokens)


def texts(line: Line) -> list[str]:
    return [completion.text for completion in line.group.completions]


CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "4"},
]
PIECES = [{"role": "assistant", "content": [{"type": "text", "text": "fo"}, {"type": "text", "text": "ur"}]}]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ({"completion": "a", "answer": "b"}, ["a"]),
        ({"response": "a", "gold": "b"}, ["a"]),
        ({"text": "a", "gold": 1.5}, ["a"]),
        ({"completions": ["a", ""], "answer": "b"}, ["a", ""]),
        ({"messages": CHAT, "answer": "b"}, ["4"]),
        ({"completion": PIECES, "answer": "b"}, ["four"]),
        ({"completion": [CHAT, PIECES, "five"], "answer": "b"}, ["4", "four", "five"]),
        ({"completion": "\ud83d", "answer": "b"}, ["\ud83d"]),
    ],
)
def test_usual_names_and_forms_are_recognised(tmp_path: Path, line: dict[str, Any], expected: list[str]) -> None:
    (found,) = read(tmp_path / "a.jsonl", line)
    assert texts(found) == expected
    assert found.group.prompt.answer == str(line.get("answer", line.get("gold")))


def test_fields_can_be_named(tmp_path: Path) -> None:
    line = {"text": "prompt", "completion": "wrong", "mine": "right", "answer": "no", "key": "yes"}
    (found,) = read(tmp_path / "a.jsonl", line, completion="mine", answer="key")
    assert (texts(found), found.group.prompt.answer) == (["right"], "yes")


def test_fields_that_may_both_be_the_completion_are_not_guessed_between(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:1: completion and text may all be the completion\. Say which: --f"):
        read(tmp_path / "a.jsonl", {"completion": "a", "text": "b", "answer": "c"})
    with pytest.raises(DataError, match=r"a\.jsonl:1: no answer: expected one of answer, gold; the line has: text"):
        read(tmp_path / "a.jsonl", {"text": "b"})


def test_a_later_line_may_not_take_another_field_for_it(tmp_path: Path) -> None:
    """`text` of the second line may be anything."""
    with pytest.raises(DataError, match=r'a\.jsonl:2: field "completion" is missing'):
        read(tmp_path / "a.jsonl", {"completion": "a", "answer": "b"}, {"text": "a", "answer": "b"})


@pytest.mark.parametrize(
    ("completion", "problem"),
    [
        ([], "an empty list"),
        (None, "null"),
        ({"role": "assistant"}, "an object"),
        ([["a"]], "a list"),
        ([{"role": "user", "content": "a"}], "without a message of role assistant"),
        ([{"role": "assistant", "content": None}], "is no text"),
        ([{"role": "assistant", "content": [{"image": "x"}]}], "is no text"),
        (["a", 1], r"completion\[1\]"),
    ],
)
def test_what_is_no_completion_is_refused(tmp_path: Path, completion: object, problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read(tmp_path / "a.jsonl", {"completion": completion, "answer": "b"})


def test_counted_tokens_take_no_memory(tmp_path: Path) -> None:
    (line,) = read(tmp_path / "a.jsonl", {"completion": ["a", "b"], "answer": "c", "num_tokens": [3, 10**15]},
                   needs_tokens=True)  # fmt: skip
    assert [len(completion.token_ids) for completion in line.group.completions] == [3, 10**15]
    for wrong in ([3], [3, True], [3, -1], 3):
        with pytest.raises(DataError, match="num_tokens"):
            read(tmp_path / "a.jsonl", {"completion": ["a", "b"], "answer": "c", "num_tokens": wrong},
                 needs_tokens=True)  # fmt: skip


def test_ten_bad_lines_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    lines = [{"completion": "a", "answer": "b"}, *[{"completion": "a", "answer": None}] * 12]
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.jsonl", *lines)
    told = str(caught.value).splitlines()
    assert (len(told), told[0].endswith("12 rows cannot be used"), told[-1]) == (12, True, "  and 2 more")


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz", "a.parquet"])
def test_other_files_are_to_be_piped(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=r"is no \.jsonl file\. Others can be piped"):
        read_lines(str(tmp_path / name), {}, compare=None, needs_tokens=False)


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no lines"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize("text", ["completion", "completion=", "x=y", "prompt=q"])
def test_wrong_fields_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--fields"):
        parse_fields(text)
    assert parse_fields("completion=a, answer = b") == {"completion": "a", "answer": "b"}
