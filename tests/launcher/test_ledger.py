"""`towline ledger`: what a run holds, and exit code 1 when a file of it cannot be trusted."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from towline.launcher.cli import command
from towline.storage.ledger import read_scores, read_shard, scores_path, seal_scores, seal_shard
from towline.storage.lineage import Lineage
from towline.storage.records import ChunkId
from towline.storage.run_directory import RunDirectory, RunLock
from towline.storage.set_aside import repair, set_aside

COMMAND = [sys.executable, "-P", "-m", "towline.launcher.cli", "ledger"]
# As in test_without_torch.py.
HIDDEN = ["torch", "vllm", "deepspeed", "mpi4py", "transformers", "tokenizers"]
FIRST_SHARD = "rollouts/step-000000/wave-0/chunk-000.h5"


def shown(run: RunDirectory, capsys: pytest.CaptureFixture[str], *, code: int = 0) -> list[str]:
    assert command(["ledger", str(run.root)]) == code
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out.splitlines()


def copy_chunk(run: RunDirectory, step: int, chunk: int, wave: int = 0, **origin: object) -> Path:
    """Another shard of a step, scored, with other values in its origin."""
    first = run.chunk(ChunkId(step=step, wave=0, chunk=0))
    shard, sheet = read_shard(first), read_scores(first)
    place = ChunkId(step=step, wave=wave, chunk=chunk)
    path = run.chunk(place)
    digest = seal_shard(path, shard.groups, dataclasses.replace(shard.origin, chunk=place, **origin))
    seal_scores(path, dataclasses.replace(sheet, shard_digest=digest))
    return path


def test_a_run_is_shown_step_by_step(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(run, capsys) == [
        "small-1  3 shards of 3 steps, 12 completions, 24 tokens",
        "    step  shards  scored  groups  completions       tokens  failed  versions",
        "       0       1       1       2            4            8       0  v0",
        "       1       1       1       2            4            8       0  v1",
        "       2       1       1       2            4            8       1  v2",
        "",
        "held-out  2 shards of 2 steps, 4 completions, 8 tokens",
        " version  shards  scored  groups  completions       tokens  failed  versions",
        "       0       1       1       2            2            4       0  v0",
        "       3       1       1       2            2            4       0  v3",
        "",
        "lineage  branch 0  no weights recorded",
        "",
        "aside    nothing",
    ]


def test_waves_are_counted_where_there_are_several(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    copy_chunk(run, 1, 0, wave=1)
    copy_chunk(run, 1, 0, wave=2)
    assert shown(run, capsys)[2:4] == [
        "       0       1       1       2            4            8       0  v0",
        "       1       3       3       6           12           24       0  v1  3 waves",
    ]


def test_branches_are_shown_with_what_is_off_policy(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    lineage = Lineage.open(run, attempt=0)
    lineage.settle(1, "a1")
    lineage.settle(2, "a2")
    Lineage.open(run, attempt=3).settle(2, "b2")
    copy_chunk(run, 2, 1, weight_hashes={1: "a1", 2: "a2"})
    copy_chunk(run, 2, 2, weight_hashes={2: "b2"}, branch=1)
    lines = shown(run, capsys)
    assert lines[4] == (
        "       2       3       3       6           12           24       3  v1 to v2, v2 of branch 1  1 off-policy"
    )
    assert lines[lines.index("") :][5:8] == [
        "",
        "lineage  branch 0  weights of v1 to v2 recorded",
        "         branch 1 leaves branch 0 at v2, attempt 3  weights of v2 recorded  (current)",
    ]


def test_what_was_set_aside_is_listed_with_its_reason_and_no_longer_counted(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    set_aside(run, run.root / FIRST_SHARD, "made by other weights\x1b[31m", 2)
    lines = shown(run, capsys)
    assert lines[0] == "small-1  2 shards of 2 steps, 8 completions, 16 tokens"
    assert lines[-3:-1] == ["aside    1 kept and never read", "  aside/rollouts/step-000000/wave-0/chunk-000.1.h5"]
    assert re.fullmatch(r"    attempt 2, \d{4}-\d\d-\d\d \d\d:\d\d: made by other weights\\x1b\[31m", lines[-1])


def test_a_damaged_shard_is_listed_and_exits_with_1(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    path = run.root / FIRST_SHARD
    path.write_bytes(path.read_bytes()[:-1])
    lines = shown(run, capsys, code=1)
    assert lines[2] == "       0       1       0       0            0            0       0    1 DAMAGED"
    assert lines[-3:-1] == ["DAMAGED  1 file; the next attempt sets aside what it needs", f"  {FIRST_SHARD}"]
    assert lines[-1].startswith("    is torn or damaged: ")
    # Nothing was changed by looking; the next attempt mends it.
    assert path.exists()
    assert len(repair(run, from_step=0, attempt=1, sampling_hash="")) == 1
    shown(run, capsys)


def test_damaged_scores_are_listed_and_exit_with_1(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    scores_path(run.root / FIRST_SHARD).write_bytes(b"")
    lines = shown(run, capsys, code=1)
    assert lines[2] == "       0       1       0       2            4            8       0  v0  1 DAMAGED"
    assert lines[-2] == "  rollouts/step-000000/wave-0/chunk-000.scores.h5"


def test_damaged_evaluations_and_scores_without_a_shard_are_found(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.root / FIRST_SHARD).unlink()
    (run.held_out / "step-000003/wave-0/chunk-000.h5").write_bytes(b"")
    lines = shown(run, capsys, code=1)
    assert lines[-5] == "DAMAGED  2 files; the next attempt sets aside what it needs"
    assert lines[-4:-2] == ["  rollouts/step-000000/wave-0/chunk-000.scores.h5", "    its shard is gone"]
    assert lines[-2] == "  held_out/step-000003/wave-0/chunk-000.h5"


def test_half_written_files_are_leftovers_unless_a_run_is_writing(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "rollouts/step-000000/wave-0/.chunk-001.h5.12.0a1b2c3d.tmp"
    (run.root / name).touch()
    assert shown(run, capsys)[-2:] == [
        "left     1 half-written file of killed writers; the next attempt removes them",
        f"  {name}",
    ]
    with RunLock(run):
        (run.root / name).touch()
        assert shown(run, capsys)[-2:] == ["writing  1 half-written file", f"  {name}"]


def test_a_run_without_shards_is_shown(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (run.rollouts, run.held_out):
        folder.rename(folder.with_suffix(".elsewhere"))
    assert shown(run, capsys) == [
        "small-1  0 shards of 0 steps, 0 completions, 0 tokens",
        "",
        "lineage  branch 0  no weights recorded",
        "",
        "aside    nothing",
    ]


def test_a_damaged_lineage_is_named_with_its_line(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    run.lineage.write_text("nonsense\n")
    assert command(["ledger", str(run.root)]) == 1
    assert f"{run.lineage}:1: 'nonsense' is no record of a version or fork" in capsys.readouterr().err


def test_the_command_imports_nothing_heavy(run: RunDirectory) -> None:
    code = f"""
import sys
sys.modules.update(dict.fromkeys({HIDDEN}))  # an import of these fails
from towline.launcher.cli import command
sys.exit(command(["ledger", sys.argv[1]]))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(run.root)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("small-1  3 shards")


def test_a_reader_that_takes_only_the_first_line_ends_the_command_quietly(run: RunDirectory) -> None:
    # More than a pipe holds, 64 KiB: the command must still be writing when its reader is gone.
    lines = "".join(
        f'{{"branch": {number}, "parent": {number - 1}, "fork": {number}, "attempt": 0}}\n' for number in range(1, 2000)
    )
    run.lineage.write_text(lines)
    with subprocess.Popen(
        [*COMMAND, str(run.root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith("small-1  3 shards")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_what_shut_programs_in_is_told(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    first = run.chunk(ChunkId(step=0, wave=0, chunk=0))
    for number, isolation in enumerate(("seccomp + landlock 7 + rlimits", "rlimits"), start=1):
        path = copy_chunk(run, 0, number)
        sheet = dataclasses.replace(read_scores(path), isolation=isolation)
        scores_path(path).unlink()
        seal_scores(path, sheet)
    assert read_scores(first).isolation == ""
    assert "programs  ran behind rlimits; seccomp + landlock 7 + rlimits" in shown(run, capsys)
