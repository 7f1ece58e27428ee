"""Rows to examples: every form that a public dataset has, every fault with its place, and what a report counts."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from towline.storage.data_config import DataConfig
from towline.storage.datasets import load_prompts
from towline.storage.errors import DataError
from towline.storage.example_config import DemonstrationData, PreferenceData, StepData
from towline.storage.example_report import Lengths
from towline.storage.examples import (
    ExampleDataset,
    leakage,
    load_demonstrations,
    load_preferences,
    load_steps,
    survey_demonstrations,
    survey_preferences,
)
from towline.storage.records import Demonstration, LabelledSteps, Preference, Role, Turn

Row = dict[str, Any]
MESSAGES = {"fields": {"messages": "messages"}}
LOADERS: dict[type, tuple[type, Callable[[Any], Any]]] = {
    Demonstration: (DemonstrationData, load_demonstrations),
    Preference: (PreferenceData, load_preferences),
    LabelledSteps: (StepData, load_steps),
}


def turn(role: Role, content: str) -> Turn:
    return Turn(role=role, content=content)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def conversation(*contents: str) -> list[dict[str, str]]:
    """User and assistant by turns."""
    return [message(("user", "assistant")[index % 2], content) for index, content in enumerate(contents)]


def jsonl(path: Path, rows: list[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(kind: type, path: Path, rows: list[Row], **values: Any) -> Any:
    config, loader = LOADERS[kind]
    source = path if path.suffix else path / "train.jsonl"
    return loader(config.model_validate({"train": str(jsonl(source, rows)), **values}, context={"folder": "/"}))


def refusal(kind: type, tmp_path: Path, row: Row, **values: Any) -> str:
    """Why a row is rejected, without its place, which is checked."""
    with pytest.raises(DataError) as caught:
        load(kind, tmp_path, [row], **values)
    place, _, reason = str(caught.value).partition(": ")
    assert place == f"{tmp_path}/train.jsonl:1"
    return reason


# Demonstrations


def test_prompt_and_completion_are_a_conversation_of_two_turns(tmp_path: Path):
    template = tmp_path / "solve.txt"
    template.write_text("Solve: {prompt}!\n")
    rows = [{"question": "1+1", "completion": "2"}, {"question": "2+2", "completion": "4"}]
    dataset = load(Demonstration, tmp_path, rows, fields={"prompt": "question"}, template=str(template))
    assert dataset.rows == (
        Demonstration(row=0, turns=(turn("user", "Solve: 1+1!"), turn("assistant", "2"))),
        Demonstration(row=1, turns=(turn("user", "Solve: 2+2!"), turn("assistant", "4"))),
    )
    assert dataset.source == str(tmp_path / "train.jsonl")


def test_messages_are_the_turns_as_they_stand(tmp_path: Path):
    rows = [{"messages": [message("system", ""), *conversation("a", "b", "c", "d")], "id": 7}]
    dataset = load(Demonstration, tmp_path, rows, **MESSAGES)
    turns = (turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d"))
    assert dataset.rows == (Demonstration(row=0, turns=(turn("system", ""), *turns)),)


def test_prompt_and_completion_may_be_lists_of_turns(tmp_path: Path):
    row = {"prompt": [message("system", "s"), message("user", "a")], "completion": [message("assistant", "b")]}
    dataset = load(Demonstration, tmp_path, [row])
    assert dataset.rows[0].turns == (turn("system", "s"), turn("user", "a"), turn("assistant", "b"))
    assert "with chat = false the prompt is a string" in refusal(Demonstration, tmp_path, row, chat=False)
    (tmp_path / "t.txt").write_text("{prompt}")
    assert "a template needs a prompt that is a string" in refusal(
        Demonstration, tmp_path, row, template=str(tmp_path / "t.txt")
    )


def test_tables_give_the_same_demonstrations_as_lines(tmp_path: Path):
    rows = [{"messages": conversation("a", "b"), "more": 1}, {"messages": conversation("c", "d", "e", "f"), "more": 2}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    table = load_demonstrations(
        DemonstrationData.model_validate({"train": str(tmp_path / "train.parquet"), **MESSAGES})
    )
    lines = load(Demonstration, tmp_path, rows, **MESSAGES)
    assert table.rows == lines.rows
    assert table.digest == lines.digest


def test_a_procedural_task_demonstrates_its_answers():
    source: dict[str, Any] = {"train": "reasoning_gym:chain_sum", "size": 3}
    prompts = load_prompts(DataConfig(**source)).prompts
    examples = load_demonstrations(DemonstrationData(**source)).rows
    assert [(example.prompt[0].content, *example.completions) for example in examples] == [
        (prompt.text, prompt.answer) for prompt in prompts
    ]


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "a", "completion": ""}, 'field "completion" is empty'),
        ({"prompt": "a", "completion": " \n"}, 'field "completion" is empty'),
        ({"prompt": "", "completion": "b"}, 'field "prompt" is empty'),
        ({"prompt": "a", "completion": None}, 'field "completion" is null; expected a string'),
        ({"prompt": "a", "completion": 18}, 'field "completion" is a number; expected a string'),
        ({"prompt": "a", "completion": conversation("b", "c")}, 'field "completion" has 2 turns; expected one'),
        (
            {"prompt": conversation("a", "b"), "completion": "c"},
            'field "prompt" ends with a turn of assistant; expected',
        ),
        (
            {"prompt": "a", "answer": "b"},
            'field "completion" is missing; the row has: prompt, answer. Name the columns in fields = { prompt = …, '
            "completion = … }, or the one column of whole conversations in fields = { messages = … }",
        ),
    ],
)
def test_a_row_that_demonstrates_nothing_is_named_with_its_reason(tmp_path: Path, row: Row, found: str):
    assert refusal(Demonstration, tmp_path, row).startswith(found)


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ("a", 'field "messages" is a string; expected a list of turns'),
        ([], 'field "messages" is an empty list; expected turns'),
        (["a"], 'turn "messages[0]" is a string; expected an object with role and content'),
        ([{"from": "human", "value": "a"}], 'turn "messages[0]" has no role; it has: from, value'),
        ([{"role": "user"}], 'turn "messages[0]" has no content; it has: role'),
        (
            [message("user", "a"), message("gpt", "b")],
            "turn \"messages[1]\" has the role 'gpt'; expected system, user or assistant",
        ),
        ([message("user", "a"), message("assistant", "")], 'field "messages[1].content" is empty'),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            'field "messages[0].content" is a list; expected a string',
        ),
        (
            [message("user", "a"), {**message("assistant", "b"), "tool_calls": [{"name": "f"}]}],
            'turn "messages[1]" has tool_calls, which is not read',
        ),
        (conversation("a", "b", "c"), 'field "messages" ends with a turn of user; expected the assistant\'s'),
        (conversation("a"), 'field "messages" has no turn of assistant; expected the last one to be'),
        ([message("assistant", "b")], 'field "messages" has one turn; expected a prompt before'),
    ],
)
def test_a_conversation_that_cannot_be_learned_is_named_with_its_reason(tmp_path: Path, messages: Any, found: str):
    assert refusal(Demonstration, tmp_path, {"messages": messages}, **MESSAGES).startswith(found)


def test_keys_of_a_turn_that_are_null_or_say_nothing_are_left(tmp_path: Path):
    row = {"messages": [{**each, "tool_calls": None, "id": 3} for each in conversation("a", "b")]}
    assert load(Demonstration, tmp_path, [row], **MESSAGES).rows[0].completions == ("b",)


def test_all_bad_rows_are_named_in_one_error_and_a_survey_keeps_the_good(tmp_path: Path):
    rows: list[Row] = [{"prompt": "a", "completion": "b"}, {"prompt": "a"}, {"prompt": "c", "completion": "d"}, {}]
    with pytest.raises(DataError, match=r"train\.jsonl: 2 rows cannot be used\n.*jsonl:2: field .*\n.*jsonl:4: field"):
        load(Demonstration, tmp_path, rows)
    dataset = survey_demonstrations(DemonstrationData(train=str(tmp_path / "train.jsonl")))
    assert [(example.row, example.completions) for example in dataset.rows] == [(0, ("b",)), (1, ("d",))]
    assert (dataset.report.num_rows, dataset.report.num_rejected, len(dataset.report.rejected)) == (2, 2, 2)


# Preferences


def pair(
    *prompt: Turn, chosen: str = "b", rejected: str = "c", margin: float | None = None, row: int = 0
) -> Preference:
    return Preference(row=row, prompt=prompt, chosen=chosen, rejected=rejected, margin=margin)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, (turn("user", "a"),)),
        ({"prompt": conversation("a"), "chosen": "b", "rejected": [message("assistant", "c")]}, (turn("user", "a"),)),
        ({"chosen": conversation("a", "b"), "rejected": conversation("a", "c")}, (turn("user", "a"),)),
        ({"prompt": None, "chosen": conversation("a", "b"), "rejected": conversation("a", "c")}, (turn("user", "a"),)),
        ({"prompt": "a", "chosen": conversation("a", "b"), "rejected": conversation("a", "c")}, (turn("user", "a"),)),
        (
            {
                "prompt": "a",
                "chosen": [message("system", "s"), *conversation("a", "b")],
                "rejected": [message("system", "s"), *conversation("a", "c")],
            },
            (turn("system", "s"), turn("user", "a")),
        ),
        (
            {"chosen": conversation("x", "y", "a", "b"), "rejected": conversation("x", "y", "a", "c")},
            (turn("user", "x"), turn("assistant", "y"), turn("user", "a")),
        ),
    ],
)
def test_every_form_of_a_preference_is_a_prompt_with_two_completions(
    tmp_path: Path, row: Row, prompt: tuple[Turn, ...]
):
    assert load(Preference, tmp_path, [row]).rows == (pair(*prompt),)


def test_the_template_wraps_a_prompt_that_the_conversations_repeat(tmp_path: Path):
    (tmp_path / "t.txt").write_text("Solve {prompt}")
    row = {"prompt": "a", "chosen": conversation("a", "b"), "rejected": conversation("a", "c")}
    dataset = load(Preference, tmp_path, [row], template=str(tmp_path / "t.txt"))
    assert dataset.rows[0].prompt == (turn("user", "Solve a"),)
    longer = {"chosen": row["chosen"], "rejected": row["rejected"]}
    assert "a template needs a prompt" in refusal(Preference, tmp_path, longer, template=str(tmp_path / "t.txt"))


def test_a_margin_is_read_where_it_is_named(tmp_path: Path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c", "gap": gap} for gap in (0, 1, 0.25)]
    named = load(Preference, tmp_path, rows, fields={"margin": "gap"})
    assert [example.margin for example in named.rows] == [0.0, 1.0, 0.25]
    plain = load(Preference, tmp_path, rows)
    assert [example.margin for example in plain.rows] == [None] * 3
    assert plain.digest != named.digest


def test_tables_of_preferences_with_and_without_a_prompt_are_read(tmp_path: Path):
    row = {"chosen": conversation("a", "b"), "rejected": conversation("a", "c")}
    for name, rows in (("without", [row]), ("with", [{"prompt": "a", **row}])):
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), path)
        assert load_preferences(PreferenceData(train=str(path))).rows == (pair(turn("user", "a")),)
    named = PreferenceData(train=str(tmp_path / "without.parquet"), fields={"prompt": "prompt"})
    with pytest.raises(DataError, match=r'field "prompt" is missing; the row has: chosen, rejected\. Name the columns'):
        load_preferences(named)


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "a", "chosen": "", "rejected": "c"}, 'field "chosen" is empty'),
        ({"prompt": "a", "chosen": "b", "rejected": None}, 'field "rejected" is null; expected a string'),
        ({"prompt": "a", "chosen": "b"}, 'field "rejected" is missing'),
        ({"chosen": "b", "rejected": "c"}, 'field "prompt" is missing'),
        (
            {"chosen": conversation("a", "b"), "rejected": conversation("x", "c")},
            "chosen and rejected differ already in turn 0 (from 0) of 2; expected conversations that differ only in",
        ),
        (
            {"chosen": conversation("a", "b"), "rejected": conversation("a", "b", "d", "c")},
            "chosen has 2 turns and rejected 4; expected conversations that differ only in the last turn",
        ),
        (
            {"chosen": conversation("a", "b", "c"), "rejected": conversation("a", "b", "d")},
            'field "chosen" ends with a turn of user',
        ),
        (
            {"prompt": "z", "chosen": conversation("a", "b"), "rejected": conversation("a", "c")},
            'field "prompt" is not what chosen and rejected have before their last turn',
        ),
    ],
)
def test_a_row_that_prefers_nothing_is_named_with_its_reason(tmp_path: Path, row: Row, found: str):
    assert refusal(Preference, tmp_path, row).startswith(found)


@pytest.mark.parametrize(
    ("margin", "found"),
    [
        (None, "is null; expected a number"),
        (True, "is true; expected a number"),
        ("1", "is a string; expected a number"),
        (float("nan"), "is NaN; expected a number"),
        (-0.5, "is -0.5, by which rejected would be the better; expected 0 or more"),
    ],
)
def test_a_margin_that_is_none_is_refused(tmp_path: Path, margin: object, found: str):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "gap": margin}
    assert refusal(Preference, tmp_path, row, fields={"margin": "gap"}) == f'field "gap" {found}'


def test_g3_32_a_pair_of_one_completion_is_flagged_and_kept(tmp_path: Path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    dataset = load(Preference, tmp_path, rows)
    assert [example.identical_pair for example in dataset.rows] == [True, False]
    assert dataset.report.num_identical_pairs == 1


def test_whole_conversations_that_are_one_are_a_pair_of_one(tmp_path: Path):
    row = {"chosen": conversation("a", "b"), "rejected": conversation("a", "b")}
    (example,) = load(Preference, tmp_path, [row]).rows
    assert example.prompt == (turn("user", "a"),)
    assert example.identical_pair


def test_repeated_and_contradicting_pairs_are_counted(tmp_path: Path):
    pairs = [("b", "c"), ("b", "c"), ("c", "b"), ("b", "b"), ("b", "b"), ("d", "c")]
    rows = [{"prompt": "a", "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    rows.append({"prompt": "z", "chosen": "c", "rejected": "b"})
    report = load(Preference, tmp_path, rows).report
    assert report.num_duplicates == 2
    assert report.num_contradictions == 1
    assert report.num_identical_pairs == 2


# Judged steps


def test_labels_are_numbers_truth_values_or_nothing(tmp_path: Path):
    row = {"prompt": "a", "steps": ["s"] * 6, "labels": [0, 1, False, True, None, -100]}
    (example,) = load(LabelledSteps, tmp_path, [row]).rows
    assert example.labels == (0, 1, 0, 1, None, None)
    assert all(type(label) in (int, type(None)) for label in example.labels)
    assert example.prompt == (turn("user", "a"),)


def test_g3_43_no_label_does_not_become_a_right_step(tmp_path: Path):
    row = {"prompt": "a", "steps": ["s"] * 5, "labels": [-100, -100, 0, -100, 1]}
    (example,) = load(LabelledSteps, tmp_path, [row]).rows
    assert example.labels == (None, None, 0, None, 1)


def test_g3_43_truth_values_of_a_table_keep_their_gaps(tmp_path: Path):
    rows = [{"prompt": "a", "steps": ["s"] * 5, "labels": [None, None, False, None, True]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    (example,) = load_steps(StepData(train=str(tmp_path / "train.parquet"))).rows
    assert example.labels == (None, None, 0, None, 1)


@pytest.mark.parametrize(
    ("steps", "labels", "found"),
    [
        (["s"], [2], 'field "labels[0]" is 2; expected 0, 1, true, false, null or -100'),
        (["s", "t"], [1, 0.5], 'field "labels[1]" is 0.5; expected 0, 1'),
        (["s"], ["+"], "field \"labels[0]\" is '+'; expected 0, 1"),
        (["s"], [[1]], 'field "labels[0]" is [1]; expected 0, 1'),
        (["s"], [1, 0], "found 1 steps and 2 labels; expected one label for each step"),
        (["s", "t"], [None, -100], 'field "labels" judges no step; expected 0 or 1 for one at least'),
        (["s", ""], [1, 0], 'field "steps[1]" is empty'),
        (["s", 3], [1, 0], 'field "steps[1]" is a number; expected a string'),
        ("s", [1], 'field "steps" is a string; expected a list'),
        ([], [], 'field "steps" is an empty list'),
    ],
)
def test_steps_that_are_not_judged_are_named_with_the_reason(tmp_path: Path, steps: Any, labels: Any, found: str):
    assert refusal(LabelledSteps, tmp_path, {"prompt": "a", "steps": steps, "labels": labels}).startswith(found)


# Digest, report, leakage


def test_the_digest_is_the_hash_of_every_text_with_its_length(tmp_path: Path):
    dataset = load(Demonstration, tmp_path, [{"prompt": "é", "completion": "7"}])
    texts = ["user", "é", "7"]
    stream = len(texts).to_bytes(8, "little")
    stream += b"".join(len(text.encode()).to_bytes(8, "little") + text.encode() for text in texts)
    assert dataset.digest == hashlib.blake2b(stream, digest_size=32).hexdigest()


def test_the_digest_sees_all_that_an_example_holds_and_their_order(tmp_path: Path):
    base = {"prompt": "a", "chosen": "b", "rejected": "c", "gap": 1}
    variants = [
        [base, {**base, "prompt": "x"}],
        [{**base, "prompt": "x"}, base],
        [base],
        [{**base, "prompt": "ab"}],
        [{**base, "chosen": "c", "rejected": "b"}],
        [{**base, "gap": 2}],
        [{**base, "prompt": [message("system", "a"), message("user", "a")]}],
    ]
    digests = {load(Preference, tmp_path, rows, fields={"margin": "gap"}).digest for rows in variants}
    judged = {
        load(LabelledSteps, tmp_path, [{"prompt": "a", "steps": ["s", "t"], "labels": labels}]).digest
        for labels in ([1, 0], [0, 1], [1, None])
    }
    assert len(digests | judged) == len(variants) + 3


def test_the_report_counts_repetitions_and_lengths(tmp_path: Path):
    rows = [{"prompt": "é" * length, "completion": "b" * (2 * length)} for length in range(1, 101)]
    report = load(Demonstration, tmp_path, [*rows, rows[0]]).report
    assert (report.num_rows, report.num_duplicates) == (101, 1)
    assert report.prompt_chars == Lengths(p50=50, p95=95, max=100)
    assert report.completion_chars == Lengths(p50=100, p95=190, max=200)


def test_one_prompt_with_another_completion_is_no_repetition(tmp_path: Path):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "c"}]
    assert load(Demonstration, tmp_path, rows).report.num_duplicates == 0


def test_held_out_examples_whose_prompt_is_trained_on_are_found(tmp_path: Path):
    train = load(Demonstration, tmp_path / "a.jsonl", [{"messages": conversation("a", "b", "c", "d")}], **MESSAGES)
    held_out: ExampleDataset[Demonstration] = load(
        Demonstration,
        tmp_path / "b.jsonl",
        [
            {"messages": conversation("a", "b", "c", "other")},
            {"messages": conversation("a", "b")},
            {"messages": [message("system", "s"), *conversation("a", "b", "c", "d")]},
        ],
        **MESSAGES,
    )
    assert [example.row for example in leakage(train, held_out)] == [0]


def test_a_source_without_rows_is_an_error_and_so_is_one_of_bad_rows(tmp_path: Path):
    with pytest.raises(DataError, match="has no rows"):
        load(Preference, tmp_path, [])
    with pytest.raises(DataError, match="2 rows cannot be used"):
        survey_preferences(PreferenceData(train=str(jsonl(tmp_path / "train.jsonl", [{}, {}]))))
