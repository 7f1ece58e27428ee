"""Metrics: named once, whole lines, no NaN in JSON, and a TensorBoard file that can be read."""

import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from towline.storage.metrics import METRICS, MetricsWriter, append_jsonl, check_names
from towline.storage.run_directory import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = sorted({name.split("/")[0] for name in METRICS if "/" in name})


def events(folder: Path) -> list[tuple[int, str, float]]:
    """Step, tag and value of every scalar: records of length, checksum, content, checksum."""
    (path,) = folder.glob("events.out.tfevents.*")
    data, start, found = path.read_bytes(), 0, []
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        event = Event.FromString(data[start + 12 : start + 12 + length])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        start += 12 + length + 4
    assert start == len(data)
    return found


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "metrics.jsonl", tmp_path / "tensorboard"


def test_a_row_a_step_goes_to_both_files(files: tuple[Path, Path]) -> None:
    writer = MetricsWriter(*files)
    writer.write(0, {"reward/mean": 0.5, "version": 1})
    writer.write(1, {"reward/mean": 0.75, "reward/part/exact_match": 0.25})
    writer.close()
    assert read_jsonl(files[0]) == [
        {"step": 0, "reward/mean": 0.5, "version": 1},
        {"step": 1, "reward/mean": 0.75, "reward/part/exact_match": 0.25},
    ]
    assert events(files[1]) == [
        (0, "reward/mean", 0.5),
        (0, "version", 1.0),
        (1, "reward/mean", 0.75),
        (1, "reward/part/exact_match", 0.25),
    ]


def test_what_is_not_finite_is_null_in_json_and_absent_in_tensorboard(files: tuple[Path, Path]) -> None:
    writer = MetricsWriter(*files)
    writer.write(2, {"loss/kl": math.nan, "loss/policy": math.inf, "loss/entropy": np.float64("-inf"), "version": 3})
    writer.close()
    text = files[0].read_text()
    assert text == '{"step": 2, "loss/kl": null, "loss/policy": null, "loss/entropy": null, "version": 3}\n'
    assert events(files[1]) == [(2, "version", 3.0)]


def test_a_metric_without_an_entry_is_our_own_mistake(files: tuple[Path, Path]) -> None:
    writer = MetricsWriter(*files)
    with pytest.raises(AssertionError, match=r"without an entry in METRICS: \['reward/men'\]"):
        writer.write(0, {"reward/mean": 1.0, "reward/men": 1.0})
    writer.close()
    assert not files[0].exists()


def test_parts_of_the_reward_are_free_names_and_nothing_else_is() -> None:
    check_names({"reward/part/exact_match": 1.0, "reward/part/any name": 1.0, "version": 1.0})
    for name in ("reward/part", "reward/part/a/b", "reward/other/a", "part/a", "a", "version/a", ""):
        with pytest.raises(AssertionError):
            check_names({name: 1.0})


def test_every_metric_that_the_code_writes_has_an_entry_and_every_entry_is_written() -> None:
    sources = [path.read_text() for room in ("trainer", "jobs", "rollout") for path in (ROOT / room).glob("*.py")]
    pattern = rf'f?"(?:{"|".join(FAMILIES)})/[a-z0-9_]+(?:/\{{[a-z_]+\}})?"'
    literals = {literal for source in sources for literal in re.findall(pattern, source)}
    written = {re.sub(r"\{\w+\}", "*", literal.removeprefix("f").strip('"')) for literal in literals}
    assert written == set(METRICS) - {"version"}


def test_every_entry_says_what_it_is() -> None:
    assert [name for name, meaning in METRICS.items() if not meaning.strip()] == []


def test_rows_are_appended(tmp_path: Path) -> None:
    for step in range(3):
        append_jsonl(tmp_path / "rows.jsonl", {"step": step, "text": "a\nb\u2028"})
    assert read_jsonl(tmp_path / "rows.jsonl") == [{"step": step, "text": "a\nb\u2028"} for step in range(3)]


@pytest.mark.parametrize("left", ["", '{"step": 0}\n'])
def test_a_line_that_a_killed_writer_left_unfinished_spoils_no_other(tmp_path: Path, left: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(left + '{"step": 1, "rew')
    before = read_jsonl(path)
    append_jsonl(path, {"step": 1})
    assert read_jsonl(path) == [*before, {"step": 1}]
    assert path.read_text() == left + '{"step": 1}\n'


def test_a_reader_beside_the_writer_sees_whole_rows_only(tmp_path: Path) -> None:
    # Rows of several pages: the kernel may show a part of one.
    code = """
import sys
from pathlib import Path
from towline.storage.metrics import append_jsonl
for step in range(200):
    append_jsonl(Path(sys.argv[1]), {"step": step, "text": "x" * 20_000})
"""
    path = tmp_path / "rows.jsonl"
    with subprocess.Popen([sys.executable, "-c", code, str(path)]) as writer:
        while writer.poll() is None:
            steps = [row["step"] for row in read_jsonl(path)]
            assert steps == list(range(len(steps)))
    assert writer.returncode == 0
    assert [row["step"] for row in read_jsonl(path)] == list(range(200))


def test_numbers_keep_their_digits(tmp_path: Path) -> None:
    values = {"a": 0.1 + 0.2, "b": 1e-300, "c": 2**62, "d": -0.0}
    append_jsonl(tmp_path / "rows.jsonl", values)
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == values
