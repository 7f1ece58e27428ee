"""What may not be read is moved aside and listed, with its reason; nothing is lost, whoever else moves or dies."""

import json
import multiprocessing
import os
import subprocess
import sys
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest

from towline.storage.errors import LedgerError
from towline.storage.ledger import (
    ScoreSheet,
    read_scored_shard,
    read_shard,
    scores_path,
    seal_scores,
    seal_shard,
    sealed_chunks,
)
from towline.storage.records import (
    ChunkId,
    Completion,
    FinishReason,
    Prompt,
    RolloutGroup,
    Score,
    ScoreStatus,
    ShardOrigin,
)
from towline.storage.run_directory import RunDirectory, RunLock
from towline.storage.set_aside import aside_path, list_aside, note_duplicate, repair, run_leftovers, set_aside


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "run")


def groups(text: str = "") -> tuple[RolloutGroup, ...]:
    completion = Completion(
        token_ids=np.array([7, 8, 9]),
        logprobs=np.array([-0.5, -0.25, -0.125]),
        versions=np.array([1, 1, 1]),
        finish_reason=FinishReason.STOP,
        seed=3,
        text=text,
    )
    prompt = Prompt(row=0, text="prompt", answer="answer")
    return (RolloutGroup(prompt=prompt, prompt_token_ids=np.array([1, 2]), completions=(completion,)),)


def shard_origin(chunk: ChunkId, sampling_hash: str = "") -> ShardOrigin:
    return ShardOrigin(
        chunk=chunk, branch=0, engine=0, attempt=0, weight_hashes={1: "a1"}, sampling={}, began=0.0, ended=1.0,
        sampling_hash=sampling_hash,
    )  # fmt: skip


def seal(
    folder: Path, step: int, chunk: int = 0, *, text: str = "", sampling_hash: str = "", scored: bool = True
) -> Path:
    place = ChunkId(step=step, wave=0, chunk=chunk)
    path = folder / f"{place}.h5"
    digest = seal_shard(path, groups(text), shard_origin(place, sampling_hash))
    if scored:
        seal_scores(path, sheet(digest))
    return path


def sheet(shard_digest: str, code_hash: str = "code") -> ScoreSheet:
    score = Score(
        parts={"exact_match": 1.0},
        part_status={"exact_match": ScoreStatus.OK},
        part_seconds={"exact_match": 0.5},
        total=1.0,
        status=ScoreStatus.OK,
        seconds=0.5,
    )
    return ScoreSheet(
        scores=(score,),
        weights={"exact_match": 1.0},
        code_hash=code_hash,
        shard_digest=shard_digest,
        began=0.0,
        ended=1.0,
    )


def in_run(run: RunDirectory, path: Path) -> str:
    return path.relative_to(run.root).as_posix()


def repaired(run: RunDirectory, **options: object) -> list[tuple[str, str]]:
    """Name and reason of each file that was set aside."""
    values = {"from_step": 0, "attempt": 1, "sampling_hash": ""} | options
    return [(Path(entry.path).name, entry.reason) for entry in repair(run, **values)]


def damage(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0xFF
    path.write_bytes(content)


def test_a_shard_goes_with_its_scores_and_one_line(run: RunDirectory) -> None:
    path = seal(run.rollouts, 3, 1)
    content, scores = path.read_bytes(), scores_path(path).read_bytes()
    place = set_aside(run, path, "made by other weights", 2)
    assert place is not None
    assert in_run(run, place) == "aside/rollouts/step-000003/wave-0/chunk-001.1.h5"
    assert (place.read_bytes(), scores_path(place).read_bytes()) == (content, scores)
    assert list(path.parent.iterdir()) == []
    (row,) = [json.loads(line) for line in run.aside_list.read_text().splitlines()]
    assert row.pop("when") > 1.7e9
    assert row == {
        "path": "rollouts/step-000003/wave-0/chunk-001.h5",
        "aside": "aside/rollouts/step-000003/wave-0/chunk-001.1.h5",
        "reason": "made by other weights",
        "attempt": 2,
    }
    assert [entry.path for entry in list_aside(run)] == [row["path"]]
    # It can still be looked at.
    assert read_scored_shard(place)[0].origin.chunk.chunk == 1
    assert sealed_chunks(run.rollouts, 3) == []


def test_scores_alone_are_set_aside_and_the_shard_stays(run: RunDirectory) -> None:
    path = seal(run.held_out, 3)
    place = set_aside(run, scores_path(path), "damaged", 2)
    assert place is not None
    assert in_run(run, place) == "aside/held_out/step-000003/wave-0/chunk-000.1.scores.h5"
    assert (path.exists(), scores_path(path).exists()) == (True, False)
    seal_scores(path, sheet(read_shard(path).digest))
    read_scored_shard(path)


def test_the_same_chunk_can_be_set_aside_again_and_again(run: RunDirectory) -> None:
    places = [set_aside(run, seal(run.rollouts, 0, text=str(number)), "r", number) for number in range(3)]
    assert [place.name for place in places if place] == ["chunk-000.1.h5", "chunk-000.2.h5", "chunk-000.3.h5"]
    for number, place in enumerate(places):
        assert place is not None
        assert read_scored_shard(place)[0].groups[0].completions[0].text == str(number)
    assert [entry.attempt for entry in list_aside(run)] == [0, 1, 2]


def test_scores_set_aside_alone_are_not_taken_for_those_of_a_later_shard(run: RunDirectory) -> None:
    path = seal(run.rollouts, 0)
    alone = set_aside(run, scores_path(path), "r", 0)
    place = set_aside(run, path, "r", 0)
    assert alone is not None
    assert place is not None
    assert (alone.name, place.name) == ("chunk-000.1.scores.h5", "chunk-000.2.h5")
    again = seal(run.rollouts, 0)
    set_aside(run, again, "r", 0)
    assert sorted(file.name for file in place.parent.iterdir()) == [
        "chunk-000.1.scores.h5", "chunk-000.2.h5", "chunk-000.3.h5", "chunk-000.3.scores.h5",
    ]  # fmt: skip


def test_a_file_that_is_gone_was_set_aside_by_another(run: RunDirectory) -> None:
    path = seal(run.rollouts, 0)
    assert set_aside(run, path, "first", 0) is not None
    assert set_aside(run, path, "second", 0) is None
    assert [entry.reason for entry in list_aside(run)] == ["first"]
    assert set_aside(run, run.rollouts / "step-000009/wave-0/chunk-000.h5", "never there", 0) is None


def _set_aside_at_once(root: Path, paths: list[Path], barrier: Barrier) -> None:
    for path in paths:
        barrier.wait()
        set_aside(RunDirectory(root), path, f"process {os.getpid()}", 0)


def test_of_processes_that_set_the_same_shard_aside_at_once_one_wins(run: RunDirectory) -> None:
    paths = [seal(run.rollouts, step, text=str(step)) for step in range(40)]
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    racers = [context.Process(target=_set_aside_at_once, args=(run.root, paths, barrier)) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    entries = list_aside(run)
    assert sorted(entry.path for entry in entries) == [in_run(run, path) for path in paths]
    for entry in entries:
        place = run.root / entry.aside
        assert place.name == "chunk-000.1.h5"
        assert read_scored_shard(place)[0].groups[0].completions[0].text == str(int(place.parts[-3].split("-")[1]))
    assert len(list(run.aside.rglob("*.h5"))) == 80
    assert list(run.rollouts.rglob("*.h5")) == []


STALLED = """
import os, sys, time
from pathlib import Path
from towline.storage import set_aside
from towline.storage.run_directory import RunDirectory

def stall(*_):
    print("here", flush=True)
    time.sleep(60)

moment = sys.argv[3]
if moment == "under both names":
    Path.unlink = stall
elif moment == "before the scores":
    set_aside._move_along = stall
else:
    set_aside._list = stall
set_aside.set_aside(RunDirectory(Path(sys.argv[1])), Path(sys.argv[2]), "r", 0)
"""


@pytest.mark.parametrize("moment", ["under both names", "before the scores", "before the line"])
def test_a_process_killed_while_it_sets_aside_loses_nothing(run: RunDirectory, moment: str) -> None:
    path = seal(run.rollouts, 0)
    content, scores = path.read_bytes(), scores_path(path).read_bytes()
    command = [sys.executable, "-c", STALLED, str(run.root), str(path), moment]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.kill()
    if moment == "under both names":
        assert set_aside(run, path, "again", 1) is not None
    elif moment == "before the scores":
        assert repaired(run) == [("chunk-000.scores.h5", "its shard is gone")]
    files = sorted(run.aside.rglob("*.h5"))
    assert sorted(file.read_bytes() for file in files) == sorted([content, scores])
    assert list(run.rollouts.rglob("*.h5")) == []
    unknown = "not recorded: the process that put it here was killed"
    assert [entry.reason for entry in list_aside(run)] == {
        "under both names": ["again"],
        "before the scores": ["its shard is gone", unknown],
        "before the line": [unknown],
    }[moment]
    assert list_aside(run)[-1].path == in_run(run, path)


def test_a_late_duplicate_is_sealed_aside_and_listed(run: RunDirectory) -> None:
    path = seal(run.rollouts, 0, text="first")
    duplicate = aside_path(run, path)
    seal_shard(duplicate, groups("second"), shard_origin(ChunkId(step=0, wave=0, chunk=0)))
    note_duplicate(run, path, duplicate, 4)
    (entry,) = list_aside(run)
    assert (entry.path, entry.attempt) == (in_run(run, path), 4)
    assert entry.reason == "a late duplicate: another engine sealed this chunk first"
    assert read_shard(path).groups[0].completions[0].text == "first"
    assert read_shard(run.root / entry.aside).groups[0].completions[0].text == "second"
    assert aside_path(run, path) != duplicate


def test_a_line_that_a_killed_writer_left_hides_no_other(run: RunDirectory) -> None:
    first, second = (set_aside(run, seal(run.rollouts, step), f"r{step}", 0) for step in range(2))
    whole = run.aside_list.read_bytes()
    run.aside_list.write_bytes(whole[:-20])
    third = set_aside(run, seal(run.rollouts, 2), "r2", 0)
    entries = list_aside(run)
    assert [entry.reason for entry in entries[:2]] == ["r0", "r2"]
    assert [run.root / entry.aside for entry in entries] == [first, third, second]
    assert (entries[2].path, entries[2].attempt) == ("rollouts/step-000001/wave-0/chunk-000.h5", None)


def test_nothing_was_set_aside_in_a_new_run(run: RunDirectory) -> None:
    assert list_aside(run) == []
    assert repaired(run) == []
    assert not run.aside.exists()


def test_whole_shards_stay_where_they_are(run: RunDirectory) -> None:
    paths = [seal(run.rollouts, step, scored=step < 2, sampling_hash="same") for step in range(3)]
    before = [path.read_bytes() for path in paths]
    assert repaired(run, sampling_hash="same", code_hash="code") == []
    assert [path.read_bytes() for path in paths] == before
    assert scores_path(paths[1]).exists()


def test_shards_truncated_anywhere_are_set_aside_with_their_scores(run: RunDirectory) -> None:
    length = seal(run.rollouts, 0).stat().st_size
    lengths = [0, 1, 7, 8, 48, 96, 512, length // 2, length - 1]
    for step, kept in enumerate(lengths, start=1):
        path = seal(run.rollouts, step)
        path.write_bytes(path.read_bytes()[:kept])
    done = repaired(run)
    assert [name for name, _ in done] == ["chunk-000.h5"] * len(lengths)
    assert all("torn or damaged" in reason and "\n" not in reason for _, reason in done)
    assert len(list(run.rollouts.rglob("*.h5"))) == 2
    assert [Path(run.root / entry.aside).stat().st_size for entry in list_aside(run)] == lengths
    assert repaired(run) == []


def test_shards_with_a_byte_flipped_are_set_aside_or_say_what_was_sealed(run: RunDirectory) -> None:
    original = seal(run.rollouts, 0)
    digest, size = read_shard(original).digest, original.stat().st_size
    positions = [*range(48), *range(48, size, max(1, size // 120)), size - 1]
    for step, position in enumerate(positions, start=1):
        damage(seal(run.rollouts, step, scored=False), position)
    aside = {entry.path for entry in repair(run, from_step=1, attempt=1, sampling_hash="")}
    for step in range(1, len(positions) + 1):
        path = run.rollouts / f"{ChunkId(step=step, wave=0, chunk=0)}.h5"
        if in_run(run, path) not in aside:
            # The byte was of no meaning: padding, or space that HDF5 left free.
            assert read_shard(path).groups[0].completions[0].token_ids.tolist() == [7, 8, 9]
    assert len(aside) > len(positions) // 3
    assert read_shard(original).digest == digest


def test_a_folder_in_the_place_of_a_shard_or_of_scores_is_set_aside(run: RunDirectory) -> None:
    for step, inside in ((0, False), (1, True)):
        path = run.rollouts / f"{ChunkId(step=step, wave=0, chunk=0)}.h5"
        path.mkdir(parents=True)
        if inside:
            (path / "precious").write_text("kept")
    scores = scores_path(seal(run.rollouts, 2, scored=False))
    scores.mkdir()
    assert repaired(run) == [
        ("chunk-000.h5", "cannot be read: Is a directory."),
        ("chunk-000.h5", "cannot be read: Is a directory."),
        ("chunk-000.scores.h5", "cannot be read: Is a directory."),
    ]
    assert (run.aside / "rollouts/step-000001/wave-0/chunk-000.1.h5/precious").read_text() == "kept"
    assert len(list_aside(run)) == 3


def test_a_full_folder_does_not_take_the_place_of_another(run: RunDirectory) -> None:
    path = run.rollouts / f"{ChunkId(step=0, wave=0, chunk=0)}.h5"
    for number in range(2):
        path.mkdir(parents=True)
        (path / str(number)).touch()
        set_aside(run, path, "r", 0)
    assert [sorted(p.name for p in (run.root / entry.aside).iterdir()) for entry in list_aside(run)] == [["0"], ["1"]]


def test_damaged_scores_go_alone_and_the_shard_can_be_scored_again(run: RunDirectory) -> None:
    torn, flipped, empty = (seal(run.rollouts, step) for step in range(3))
    scores_path(torn).write_bytes(scores_path(torn).read_bytes()[:300])
    damage(scores_path(flipped), 4)
    scores_path(empty).write_bytes(b"")
    assert [name for name, _ in repaired(run)] == ["chunk-000.scores.h5"] * 3
    for path in (torn, flipped, empty):
        seal_scores(path, sheet(read_shard(path).digest))
        read_scored_shard(path)
    assert repaired(run) == []


def test_scores_of_another_shard_go_alone(run: RunDirectory) -> None:
    path = seal(run.rollouts, 0, scored=False)
    seal_scores(path, sheet("another"))
    ((name, reason),) = repaired(run)
    assert (name, "was made for another shard" in reason) == ("chunk-000.scores.h5", True)
    assert path.exists()


def test_scores_of_other_reward_code_go_alone_if_asked_for(run: RunDirectory) -> None:
    path = seal(run.rollouts, 0)
    assert repaired(run) == []
    assert repaired(run, code_hash="new") == [("chunk-000.scores.h5", "scored by other reward code: hash code")]
    assert path.exists()


def test_scores_without_their_shard_are_set_aside(run: RunDirectory) -> None:
    seal(run.rollouts, 1).unlink()
    assert repaired(run, from_step=2) == []
    assert repaired(run, from_step=1) == [("chunk-000.scores.h5", "its shard is gone")]


def test_shards_of_other_settings_or_data_are_set_aside(run: RunDirectory) -> None:
    old, _, _ = (seal(run.rollouts, step, sampling_hash=text) for step, text in enumerate(("old", "new", "")))
    assert repaired(run, sampling_hash="new") == [
        ("chunk-000.h5", "sampled with other settings or data: hash old, expected new")
    ]
    assert not scores_path(old).exists()
    assert len(list(run.rollouts.rglob("*.h5"))) == 4


def test_a_shard_in_the_place_of_another_chunk_is_set_aside(run: RunDirectory) -> None:
    path, other = seal(run.rollouts, 0), run.rollouts / "step-000000/wave-0/chunk-001.h5"
    other.write_bytes(path.read_bytes())
    assert repaired(run) == [("chunk-001.h5", "it holds the chunk step-000000/wave-0/chunk-000")]


def test_only_steps_still_to_be_trained_and_only_the_folder_asked_for_are_looked_at(run: RunDirectory) -> None:
    for folder in (run.rollouts, run.held_out):
        for step in range(3):
            seal(folder, step).write_bytes(b"")
    assert [entry.path for entry in repair(run, from_step=1, attempt=0, sampling_hash="")] == [
        "rollouts/step-000001/wave-0/chunk-000.h5",
        "rollouts/step-000002/wave-0/chunk-000.h5",
    ]
    done = repair(run, from_step=2, attempt=0, sampling_hash="", folder=run.held_out)
    assert [entry.path for entry in done] == ["held_out/step-000002/wave-0/chunk-000.h5"]


KILLED_WRITER = """
import os, sys, time
from pathlib import Path
from towline.storage.ledger import read_shard, seal_shard

def stall(*_):
    print("here", flush=True)
    time.sleep(60)

shard = read_shard(Path(sys.argv[1]))
os.link = stall
seal_shard(Path(sys.argv[2]), shard.groups, shard.origin)
"""


@pytest.mark.parametrize("by", ["repair", "lock"])
@pytest.mark.parametrize("folder", ["rollouts", "aside/rollouts"])
def test_what_a_killed_writer_left_is_removed(run: RunDirectory, by: str, folder: str) -> None:
    path = seal(run.rollouts, 0)
    late = run.root / folder / "step-000000/wave-0/chunk-001.h5"
    command = [sys.executable, "-c", KILLED_WRITER, str(path), str(late)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "here\n"
        writer.kill()
    assert [file.parent for file in run_leftovers(run)] == [late.parent]
    if by == "repair":
        assert repaired(run) == []
    else:
        with RunLock(run):
            pass
    assert run_leftovers(run) == []
    assert read_scored_shard(path)
    with pytest.raises(LedgerError, match="is missing"):
        read_shard(late)
