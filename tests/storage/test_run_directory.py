"""The run folder: private, never overwritten, used by one supervisor at a time, and readable while it is written."""

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from towline.storage.errors import RunFolderError
from towline.storage.publish import publish_first
from towline.storage.records import ChunkId
from towline.storage.run_directory import RunDirectory, RunLock, is_locked, read_jsonl, write_json

HOLDER = """
import subprocess, sys
from pathlib import Path
from towline.storage.run_directory import RunDirectory, RunLock
with RunLock(RunDirectory(Path(sys.argv[1]))):
    child = subprocess.Popen(["sleep", "60"])
    print(child.pid, flush=True)
    child.wait()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs/first")


@contextmanager
def holder(run: RunDirectory) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another program that holds the run's lock, and a child of that program."""
    command = [sys.executable, "-c", HOLDER, str(run.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        try:
            yield process, child
        finally:
            process.kill()
            os.kill(child, 9)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_is_its_owner_s_alone(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        run = RunDirectory.create(tmp_path / "runs/first")
    finally:
        os.umask(previous)
    assert mode(run.root) == 0o700
    assert mode(run.key) == 0o600
    assert len(bytes.fromhex(run.key.read_text())) == 32


def test_each_run_has_its_own_key(tmp_path: Path) -> None:
    assert RunDirectory.create(tmp_path / "a").key.read_text() != RunDirectory.create(tmp_path / "b").key.read_text()


def test_an_existing_folder_is_refused_and_left_alone(run: RunDirectory) -> None:
    before = run.key.read_text()
    with pytest.raises(RunFolderError, match=r"run folder .*first exists\. Choose another with -o run\.name=NAME"):
        RunDirectory.create(run.root)
    assert run.key.read_text() == before


def test_an_existing_folder_that_a_run_is_using_is_said_to_be_in_use(run: RunDirectory) -> None:
    with RunLock(run), pytest.raises(RunFolderError, match="first exists and a run is using it now"):
        RunDirectory.create(run.root)


def test_a_file_in_the_place_of_the_run_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(RunFolderError, match="taken exists"):
        RunDirectory.create(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.parametrize("name", ["file/run", "file/deeper/run"])
def test_a_folder_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"run cannot be made: .*[Nn]ot a (folder|directory).*\. Set run\.root"):
        RunDirectory.create(tmp_path / name)


def test_a_run_folder_is_known_by_its_resolved_experiment(run: RunDirectory) -> None:
    with pytest.raises(RunFolderError, match=r"first is not a run folder: experiment\.json is missing"):
        RunDirectory.open(run.root)
    run.config.write_text("{}")
    assert RunDirectory.open(run.root) == run


def test_every_path_lies_in_the_run_and_no_two_are_one(run: RunDirectory) -> None:
    names = [name for name, value in vars(RunDirectory).items() if isinstance(value, property) and name != "attempts"]
    paths = [getattr(run, name) for name in names] + [run.logs(0), run.log(0, "trainer.0"), run.faults(0), run.logs(1)]
    assert len(names) >= 12
    assert len(set(paths)) == len(paths)
    assert all(path.is_relative_to(run.root) for path in paths)
    assert run.chunk(ChunkId(step=3, wave=0, chunk=12)) == run.root / "rollouts/step-000003/wave-0/chunk-012.h5"
    assert run.log(2, "rollout.1") == run.root / "logs/attempt-2/rollout.1.log"


def test_attempts_are_counted_by_their_logs(run: RunDirectory) -> None:
    assert run.attempts == 0
    for attempt in range(2):
        run.logs(attempt).mkdir(parents=True)
    assert run.attempts == 2


def test_one_supervisor_at_a_time(run: RunDirectory) -> None:
    assert not is_locked(run)
    with RunLock(run):
        assert is_locked(run)
        with pytest.raises(RunFolderError, match="first is in use by another supervisor"):
            RunLock(run)
        assert is_locked(run)
    assert not is_locked(run)


def test_asking_does_not_take_the_lock(run: RunDirectory) -> None:
    for _ in range(3):
        with RunLock(run):
            pass
        assert not is_locked(run)


def test_the_lock_of_a_killed_supervisor_is_free_even_while_its_children_live(run: RunDirectory) -> None:
    with holder(run) as (process, child):
        assert is_locked(run)
        with pytest.raises(RunFolderError, match="in use"):
            RunLock(run)
        process.kill()
        process.wait()
        os.kill(child, 0)
        assert not is_locked(run)
        with RunLock(run):
            assert is_locked(run)


def test_a_file_system_without_locks_is_named_as_such(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    run.lock.touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunFolderError, match=r"cannot be locked: Function not implemented.*must support flock"):
        RunLock(run)
    assert not is_locked(run)


def test_who_takes_the_run_clears_what_killed_writers_left(run: RunDirectory) -> None:
    # case G5-06
    sealed = [run.chunk(ChunkId(step=0, wave=0, chunk=0)), run.held_out / "step-000001/wave-0/chunk-000.h5"]
    left: list[Path] = []
    for path in sealed:
        with publish_first(path) as temporary:
            temporary.write_text("whole")
        left.append(temporary)
    for path in left:
        path.write_text("half")
    assert is_locked(run) is False
    assert all(path.exists() for path in left)
    with RunLock(run):
        assert not [path for path in left if path.exists()]
    assert [path.read_text() for path in sealed] == ["whole", "whole"]


def test_the_state_keeps_what_is_not_named(run: RunDirectory) -> None:
    assert run.read_state() == {}
    run.write_state(status="running", attempt=0)
    run.write_state(status="done", ended=1.5)
    assert run.read_state() == {"status": "done", "attempt": 0, "ended": 1.5}
    assert json.loads(run.state.read_text()) == run.read_state()


def test_a_state_that_cannot_be_written_leaves_the_one_before(run: RunDirectory) -> None:
    run.write_state(status="running")
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="Circular"):
        run.write_state(status="done", odd=circle)
    assert run.read_state() == {"status": "running"}
    assert sorted(path.name for path in run.root.iterdir()) == ["state.json", "store.key"]


STALLING_WRITER = """
import sys, time
from pathlib import Path
from towline.storage.run_directory import RunDirectory
write = Path.write_text
def write_half(path, text):
    write(path, text[: len(text) // 2])
    print("here", flush=True)
    time.sleep(60)
Path.write_text = write_half
RunDirectory(Path(sys.argv[1])).write_state(status="done")
"""


def test_a_writer_of_the_state_killed_half_way_leaves_the_one_before(run: RunDirectory) -> None:
    run.write_state(status="running")
    command = [sys.executable, "-c", STALLING_WRITER, str(run.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "here\n"
        assert run.read_state() == {"status": "running"}
        writer.kill()
    assert run.read_state() == {"status": "running"}
    run.write_state(status="failed")
    assert run.read_state() == {"status": "failed"}


def test_json_is_written_in_one_order_with_paths_as_text(tmp_path: Path) -> None:
    write_json(tmp_path / "a/b.json", {"b": Path("/x"), "a": "é"})
    assert (tmp_path / "a/b.json").read_text() == '{\n  "a": "\\u00e9",\n  "b": "/x"\n}\n'


def test_rows_are_read_up_to_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_jsonl(path) == []
    for text, rows in (
        ("", []),
        ('{"step": 1', []),
        ('{"step": 1}', []),
        ('{"step": 1}\n', [{"step": 1}]),
        ('{"step": 1}\n{"step": 2, "x": "\\u', [{"step": 1}]),
    ):
        path.write_text(text)
        assert read_jsonl(path) == rows


def test_a_line_is_what_ends_with_a_newline_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"text": "a\u2028b\u0085c"}\n'.encode() + '{"text": "é'.encode()[:-1])
    assert read_jsonl(path) == [{"text": "a\u2028b\u0085c"}]
