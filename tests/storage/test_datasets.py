import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from towline.storage.data_config import DataConfig
from towline.storage.datasets import PromptDataset, load_prompts, survey_prompts
from towline.storage.errors import ConfigError, DataError

SHARED_DATA = Path(__file__).parents[2] / ".." / "shared" / "data"
ROWS = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "2+2?", "answer": "4"}, {"prompt": "3+3?", "answer": "6"}]


def config(source: Path | str, **values: Any) -> DataConfig:
    return DataConfig.model_validate({"train": str(source), **values}, context={"folder": "/"})


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def raw(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    return path


def table(path: Path, rows: list[dict[str, Any]], row_group_size: int = 2) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def texts(dataset: PromptDataset) -> list[tuple[str, str]]:
    return [(prompt.text, prompt.answer) for prompt in dataset.prompts]


def refusal(source: Path | str, **values: Any) -> str:
    with pytest.raises(DataError) as caught:
        load_prompts(config(source, **values))
    return str(caught.value)


# Sources


def test_every_kind_of_source_gives_the_same_dataset(tmp_path: Path):
    import datasets

    saved = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(str(saved), num_shards=2)
    sources = [
        jsonl(tmp_path / "a.jsonl", ROWS),
        table(tmp_path / "a.parquet", ROWS),
        saved,
        jsonl(tmp_path / "lines" / "part-0.jsonl", ROWS[:2]).parent,
        table(tmp_path / "tables" / "train-00000-of-00002.parquet", ROWS[:1]).parent,
    ]
    jsonl(tmp_path / "lines" / "part-1.jsonl", ROWS[2:])
    table(tmp_path / "tables" / "train-00001-of-00002.parquet", ROWS[1:])
    loaded = [load_prompts(config(source)) for source in sources]
    for dataset, source in zip(loaded, sources, strict=True):
        assert texts(dataset) == [("1+1?", "2"), ("2+2?", "4"), ("3+3?", "6")], source
        assert [prompt.row for prompt in dataset.prompts] == [0, 1, 2]
        assert dataset.source == str(source)
    assert len({dataset.digest for dataset in loaded}) == 1


def test_a_saved_dictionary_of_one_split_is_read_and_of_two_is_refused(tmp_path: Path):
    import datasets

    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows}).save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "two"))
    assert load_prompts(config(tmp_path / "one")).report.num_rows == 3
    assert "holds the splits train, test; name one of them" in refusal(tmp_path / "two")
    assert load_prompts(config(tmp_path / "two" / "train")).report.num_rows == 3


def test_a_folder_that_mixes_splits_is_refused(tmp_path: Path):
    jsonl(tmp_path / "gsm8k_train.jsonl", ROWS)
    assert load_prompts(config(tmp_path)).report.num_rows == 3
    jsonl(tmp_path / "gsm8k_test.jsonl", ROWS)
    assert "mixes splits (gsm8k_test.jsonl, gsm8k_train.jsonl)" in refusal(tmp_path)


def test_a_folder_of_the_same_rows_in_two_formats_is_refused(tmp_path: Path):
    jsonl(tmp_path / "rows.jsonl", ROWS)
    table(tmp_path / "rows.parquet", ROWS)
    assert "holds .jsonl and .parquet files" in refusal(tmp_path)


def test_a_folder_without_data_says_what_it_holds(tmp_path: Path):
    jsonl(tmp_path / "data" / "train.jsonl", ROWS)
    assert "holds no .jsonl or .parquet file; found data" in refusal(tmp_path)


def test_a_missing_source_names_the_nearest(tmp_path: Path):
    jsonl(tmp_path / "train.jsonl", ROWS)
    assert "trian.jsonl does not exist. Did you mean train.jsonl?" in refusal(tmp_path / "trian.jsonl")
    assert "nothing is fetched from the Hub" in refusal(tmp_path / "openai" / "gsm8k")


def test_another_kind_of_file_is_refused(tmp_path: Path):
    (tmp_path / "train.csv").write_text("prompt,answer\n")
    assert "expected a .jsonl or .parquet file" in refusal(tmp_path / "train.csv")


def test_an_empty_dataset_is_refused(tmp_path: Path):
    assert "has no rows" in refusal(raw(tmp_path, b""))
    assert "has no rows" in refusal(raw(tmp_path, b"\n \n"))
    empty = pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())})
    parquet.write_table(empty, tmp_path / "empty.parquet")
    assert "has no rows" in refusal(tmp_path / "empty.parquet")


# Lines


def test_byte_order_mark_crlf_and_blank_lines_at_the_end_are_fine(tmp_path: Path):
    plain = load_prompts(config(jsonl(tmp_path / "plain.jsonl", ROWS)))
    lines = [json.dumps(row).encode() for row in ROWS]
    windows = raw(tmp_path, b"\xef\xbb\xbf" + b"\r\n".join(lines) + b"\r\n\r\n  \r\n")
    assert load_prompts(config(windows)).prompts == plain.prompts
    without_end = raw(tmp_path, b"\n".join(lines))
    assert load_prompts(config(without_end)).prompts == plain.prompts


def test_a_line_separator_inside_a_string_does_not_split_the_row(tmp_path: Path):
    path = raw(tmp_path, '{"prompt": "a\u2028b\x85c", "answer": "x"}\n'.encode())
    assert texts(load_prompts(config(path))) == [("a\u2028b\x85c", "x")]


def test_a_blank_line_in_the_middle_is_refused_with_its_line(tmp_path: Path):
    path = raw(tmp_path, b'{"prompt": "a", "answer": "b"}\n\n' + b'{"prompt": "c", "answer": "d"}\n' * 2)
    assert refusal(path) == f"{path}:2: blank line; expected a JSON object"


def test_invalid_utf8_names_the_line_and_the_byte(tmp_path: Path):
    path = raw(tmp_path, b'{"prompt": "a", "answer": "b"}\n{"prompt": "caf\xe9", "answer": "d"}\n')
    assert refusal(path) == f"{path}:2: byte 0xe9 at 16 is not UTF-8"


def test_a_torn_last_line_is_refused(tmp_path: Path):
    path = raw(tmp_path, b'{"prompt": "a", "answer": "b"}\n{"prompt": "c", "ans')
    assert refusal(path).startswith(f"{path}:2: not JSON at column 17: Unterminated string")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b"[1, 2]", "found a list; expected a JSON object"),
        (b"null", "found null; expected a JSON object"),
        (b"12", "found a number; expected a JSON object"),
        (b"9" * 5000, "not usable as JSON"),
        (b"[" * 200_000, "not usable as JSON"),
        (b"{'prompt': 1}", "not JSON"),
    ],
)
def test_a_line_that_is_no_object_is_refused(tmp_path: Path, line: bytes, found: str):
    assert f"train.jsonl:1: {found}" in refusal(raw(tmp_path, line + b"\n"))


# Fields


def test_a_missing_field_names_the_row_and_the_nearest_field(tmp_path: Path):
    rows = [{"question": "q", "answer": "a"}] * 16 + [{"qestion": "q", "answer": "a"}]
    path = jsonl(tmp_path / "train.jsonl", rows)
    assert refusal(path, fields={"prompt": "question"}) == (
        f'{path}:17: field "question" is missing; the row has: qestion, answer. Did you mean qestion?'
    )


def test_a_missing_field_without_a_near_one_says_how_to_name_it(tmp_path: Path):
    path = jsonl(tmp_path / "train.jsonl", [{"text": "q", "answer": "a"}])
    assert refusal(path).endswith("the row has: text, answer. Name the columns in fields = { prompt = …, answer = … }")


def test_a_missing_column_is_refused_for_the_whole_table(tmp_path: Path):
    path = table(tmp_path / "train.parquet", [{"prompts": "q", "answer": "a"}])
    assert refusal(path) == (f'{path}: field "prompt" is missing; the row has: prompts, answer. Did you mean prompts?')


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "", "answer": "a"}, 'field "prompt" is empty'),
        ({"prompt": " \n", "answer": "a"}, 'field "prompt" is empty'),
        ({"prompt": "q", "answer": ""}, 'field "answer" is empty'),
        ({"prompt": None, "answer": "a"}, 'field "prompt" is null; expected a string'),
        ({"prompt": 3, "answer": "a"}, 'field "prompt" is a number; expected a string'),
        ({"prompt": [{"role": "user"}], "answer": "a"}, 'field "prompt" is a list; expected a string'),
        ({"prompt": "q", "answer": None}, 'field "answer" is null; expected a string, number, list or object'),
        ({"prompt": "q", "answer": True}, 'field "answer" is true; expected a string, number, list or object'),
        ({"prompt": "q", "answer": []}, 'field "answer" is a list; expected a string, number, list or object'),
        (
            {"prompt": "q", "answer": {}},
            'field "answer" is an object; expected a string, number, list or object',
        ),
        (
            {"prompt": "q", "answer": float("nan")},
            'field "answer" is NaN; expected a string, number, list or object',
        ),
        (
            {"prompt": "q", "answer": float("-inf")},
            'field "answer" is -Infinity; expected a string, number, list or object',
        ),
        ({"prompt": "q\ud800", "answer": "a"}, 'field "prompt" holds half a surrogate pair (U+D800) at 1'),
    ],
)
def test_a_value_that_makes_no_prompt_is_refused(tmp_path: Path, row: dict[str, Any], found: str):
    path = jsonl(tmp_path / "train.jsonl", [ROWS[0], row])
    assert refusal(path).startswith(f"{path}:2: {found}")


@pytest.mark.parametrize(
    ("answer", "text"),
    [(18, "18"), (-3, "-3"), (0.5, "0.5"), (18.0, "18.0"), (10**30, "1" + "0" * 30), (1e-7, "1e-07")],
)
def test_a_number_becomes_its_json_text(tmp_path: Path, answer: float, text: str):
    path = jsonl(tmp_path / "train.jsonl", [{"prompt": "q", "answer": answer}])
    assert load_prompts(config(path)).prompts[0].answer == text


@pytest.mark.parametrize(
    ("answer", "text"),
    [(["assert f(2) == 4", "é"], '["assert f(2) == 4", "é"]'), ({"test": "t", "n": 1}, '{"test": "t", "n": 1}')],
)
def test_a_list_or_an_object_becomes_its_json_text(tmp_path: Path, answer: Any, text: str):
    path = jsonl(tmp_path / "train.jsonl", [{"prompt": "q", "answer": answer}])
    assert load_prompts(config(path)).prompts[0].answer == text


def test_several_columns_make_one_answer_without_those_that_are_null(tmp_path: Path):
    row = {"prompt": "def f(x):", "test": "def check(c): ...", "entry_point": "f", "setup": None, "other": 1}
    fields = {"answer": ("prompt", "test", "entry_point", "setup")}
    for path in (jsonl(tmp_path / "train.jsonl", [row]), table(tmp_path / "train.parquet", [row | {"setup": None}])):
        answer = json.loads(load_prompts(config(path, fields=fields)).prompts[0].answer)
        assert answer == {"prompt": "def f(x):", "test": "def check(c): ...", "entry_point": "f"}


def test_a_column_of_several_that_is_missing_is_named(tmp_path: Path):
    path = jsonl(tmp_path / "train.jsonl", [{"prompt": "q", "test": "t"}])
    with pytest.raises(DataError, match='field "entry_point" is missing'):
        load_prompts(config(path, fields={"answer": ("test", "entry_point")}))


def test_numbers_of_a_table_become_the_same_text(tmp_path: Path):
    path = table(tmp_path / "train.parquet", [{"prompt": "q", "answer": 18}, {"prompt": "r", "answer": 19}])
    assert [prompt.answer for prompt in load_prompts(config(path)).prompts] == ["18", "19"]


def test_a_bad_row_of_a_table_is_named_across_row_groups(tmp_path: Path):
    path = table(tmp_path / "train.parquet", [*ROWS, {"prompt": "q", "answer": None}])
    assert refusal(path) == f'{path} row 3 (from 0): field "answer" is null; expected a string, number, list or object'


def test_a_torn_table_is_refused(tmp_path: Path):
    path = table(tmp_path / "train.parquet", ROWS)
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path} cannot be read from row 0 (from 0) on" in refusal(path)


def test_up_to_ten_bad_rows_are_named_in_one_error(tmp_path: Path):
    path = jsonl(tmp_path / "train.jsonl", [ROWS[0]] + [{"prompt": "q"}] * 12)
    lines = refusal(path).splitlines()
    assert lines[0] == f"{path}: 12 rows cannot be used"
    assert [line.strip().split(": ")[0] for line in lines[1:-1]] == [f"{path}:{number}" for number in range(2, 12)]
    assert lines[-1] == "  and 2 more"


def test_ten_bad_rows_leave_none_over(tmp_path: Path):
    path = jsonl(tmp_path / "train.jsonl", [{"prompt": "q"}] * 10)
    assert len(refusal(path).splitlines()) == 11


def test_a_path_in_the_working_folder_is_shown_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = jsonl(tmp_path / "data" / "train.jsonl", [{"prompt": "q", "answer": ""}])
    monkeypatch.chdir(tmp_path)
    assert refusal(path) == 'data/train.jsonl:1: field "answer" is empty'


# Template


def test_the_template_is_filled_and_its_other_braces_are_literal(tmp_path: Path):
    template = tmp_path / "boxed.txt"
    template.write_text("Solve:\n{prompt}\nAnswer in \\boxed{} as {x}.\n")
    path = jsonl(tmp_path / "train.jsonl", [{"prompt": "{prompt} {0}?", "answer": "a"}])
    dataset = load_prompts(config(path, template=str(template)))
    assert dataset.prompts[0].text == "Solve:\n{prompt} {0}?\nAnswer in \\boxed{} as {x}."
    assert dataset.report.prompt_chars_max == len(dataset.prompts[0].text)
    assert dataset.digest != load_prompts(config(path)).digest


@pytest.mark.parametrize(("content", "found"), [("no place", 0), ("{prompt} {prompt}", 2), ("{ prompt }", 0)])
def test_a_template_needs_exactly_one_placeholder(tmp_path: Path, content: str, found: int):
    (tmp_path / "boxed.txt").write_text(content)
    with pytest.raises(ConfigError, match=rf"boxed.txt holds {{prompt}} {found} times; expected exactly once"):
        load_prompts(config(jsonl(tmp_path / "a.jsonl", ROWS), template=str(tmp_path / "boxed.txt")))


def test_a_template_that_cannot_be_read_is_refused(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"missing\.txt cannot be read: No such file"):
        load_prompts(config(path, template=str(tmp_path / "missing.txt")))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 {prompt}")
    with pytest.raises(ConfigError, match=r"latin\.txt is not UTF-8: byte 3 is 0xe9"):
        load_prompts(config(path, template=str(tmp_path / "latin.txt")))


# Digest and report


def test_the_digest_is_the_hash_of_every_text_with_its_length(tmp_path: Path):
    path = jsonl(tmp_path / "train.jsonl", [{"prompt": "é", "answer": 7}])
    stream = b"\x02\0\0\0\0\0\0\0\xc3\xa9" + b"\x01\0\0\0\0\0\0\0" + b"7"
    assert load_prompts(config(path)).digest == hashlib.blake2b(stream, digest_size=32).hexdigest()


def test_the_digest_sees_order_answers_and_where_a_text_ends(tmp_path: Path):
    variants = [
        [("ab", "c"), ("d", "e")],
        [("a", "bc"), ("d", "e")],
        [("d", "e"), ("ab", "c")],
        [("ab", "c"), ("d", "f")],
        [("ab", "c")],
    ]
    digests = {
        load_prompts(config(jsonl(tmp_path / "train.jsonl", [{"prompt": p, "answer": a} for p, a in rows]))).digest
        for rows in variants
    }
    assert len(digests) == len(variants)


def test_columns_that_are_not_used_do_not_change_the_digest(tmp_path: Path):
    more = [{**row, "level": 3} for row in ROWS]
    plain, extended = jsonl(tmp_path / "a.jsonl", ROWS), jsonl(tmp_path / "b.jsonl", more)
    assert load_prompts(config(plain)).digest == load_prompts(config(extended)).digest


def test_duplicates_are_counted_and_kept(tmp_path: Path):
    path = jsonl(tmp_path / "train.jsonl", [ROWS[0], ROWS[1], ROWS[0], {"prompt": "1+1?", "answer": "two"}])
    dataset = load_prompts(config(path))
    assert len(dataset.prompts) == dataset.report.num_rows == 4
    assert dataset.report.num_duplicates == 2


def test_quantiles_are_lengths_that_occur(tmp_path: Path):
    path = jsonl(tmp_path / "train.jsonl", [{"prompt": "é" * length, "answer": "a"} for length in range(1, 101)])
    report = load_prompts(config(path)).report
    assert (report.prompt_chars_p50, report.prompt_chars_p95, report.prompt_chars_max) == (50, 95, 100)


def test_a_survey_keeps_the_good_rows_and_lists_the_rest(tmp_path: Path):
    path = jsonl(tmp_path / "train.jsonl", [ROWS[0], {"prompt": "q"}, ROWS[1]] + [{"answer": "a"}] * 11)
    dataset = survey_prompts(config(path))
    assert texts(dataset) == [("1+1?", "2"), ("2+2?", "4")]
    assert dataset.report.num_rejected == 12
    assert len(dataset.report.rejected) == 10
    assert dataset.report.rejected[0].startswith(f'{path}:2: field "answer" is missing')


def test_a_survey_of_nothing_but_bad_rows_is_an_error(tmp_path: Path):
    with pytest.raises(DataError, match="2 rows cannot be used"):
        survey_prompts(config(jsonl(tmp_path / "train.jsonl", [{"prompt": "q"}] * 2)))


# Procedural tasks


def test_a_task_is_a_function_of_its_seed_size_and_options():
    first = load_prompts(config("reasoning_gym:chain_sum", size=20, seed=3))
    assert first.report.num_rows == 20
    assert first.source == "reasoning_gym:chain_sum"
    assert load_prompts(config("reasoning_gym:chain_sum", size=20, seed=3)).digest == first.digest
    assert load_prompts(config("reasoning_gym:chain_sum", size=20, seed=4)).digest != first.digest
    longer = load_prompts(config("reasoning_gym:chain_sum", size=20, seed=3, options={"min_terms": 6}))
    assert longer.digest != first.digest


def test_answers_of_a_task_are_right():
    dataset = load_prompts(config("reasoning_gym:chain_sum", size=5, options={"min_digits": 2, "max_digits": 2}))
    for prompt in dataset.prompts:
        terms = prompt.text.partition(": ")[2].removesuffix(" =").replace("- ", "-").replace("+ ", "").split()
        assert sum(map(int, terms)) == int(prompt.answer)


def test_an_unknown_task_names_the_nearest():
    assert "reasoning_gym:chain_sun is not a task. Nearest: chain_sum" in refusal("reasoning_gym:chain_sun", size=2)


def test_an_unknown_option_names_the_known():
    message = refusal("reasoning_gym:chain_sum", size=2, options={"terms": 3})
    assert "options.terms is not a setting; known: " in message
    assert "min_terms" in message


def test_a_value_that_a_task_refuses_is_an_error_of_the_data():
    message = refusal("reasoning_gym:chain_sum", size=2, options={"min_terms": 0})
    assert message == "reasoning_gym:chain_sum refuses its options: min_terms must be positive"


def test_a_task_without_gold_answers_is_refused():
    assert 'reasoning_gym:rush_hour[0]: field "answer" is null' in refusal("reasoning_gym:rush_hour", size=2)


# Optional packages


@pytest.mark.parametrize(
    ("source", "package"),
    [("train.parquet", "pyarrow"), ("saved", "pyarrow"), ("reasoning_gym:chain_sum", "reasoning_gym")],
)
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, package: str):
    table(tmp_path / "train.parquet", ROWS)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    for module in (package, "pyarrow.parquet", "reasoning_gym.factory"):
        monkeypatch.setitem(sys.modules, module, None)
    is_task = source.startswith("reasoning_gym")
    message = refusal(source, size=2) if is_task else refusal(tmp_path / source)
    assert f"needs {package}, which cannot be imported here" in message


def test_jsonl_needs_no_optional_package(tmp_path: Path):
    path = jsonl(tmp_path / "train.jsonl", ROWS)
    program = (
        "import sys\n"
        "from towline.storage.data_config import DataConfig\n"
        "from towline.storage.datasets import load_prompts\n"
        f"load_prompts(DataConfig(train={str(path)!r}))\n"
        "print(sorted({'pyarrow', 'datasets', 'reasoning_gym', 'torch'} & sys.modules.keys()))"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Real data


@pytest.mark.parametrize(
    ("name", "fields", "num_rows", "last"),
    [
        ("gsm8k_train.jsonl", {"prompt": "question"}, 7473, None),
        ("gsm8k_test.jsonl", {"prompt": "question"}, 1319, None),
        ("math500.jsonl", {"prompt": "problem"}, 500, None),
        ("aime2024.jsonl", {"prompt": "problem"}, 30, "204"),
    ],
)
def test_public_datasets_load_as_they_are(name: str, fields: dict[str, str], num_rows: int, last: str | None):
    path = SHARED_DATA / name
    if not path.exists():
        pytest.skip(f"../shared/data/{name} is not here")
    dataset = load_prompts(config(path.resolve(), fields=fields))
    assert dataset.report.num_rows == num_rows
    if name.startswith("gsm8k"):
        assert all("####" in prompt.answer for prompt in dataset.prompts)
    if last is not None:
        assert dataset.prompts[0].answer == last
    assert np.all([prompt.row == row for row, prompt in enumerate(dataset.prompts)])
