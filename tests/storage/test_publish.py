"""Files appear whole or not at all, the first one wins, and nobody's leftovers are taken for a file."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from towline.storage.publish import publish_first, remove_leftovers, replace_whole

Publisher = Callable[[Path], AbstractContextManager[Path]]


def publish(final: Path, content: str) -> None:
    with publish_first(final) as temporary:
        temporary.write_text(content)


def test_a_file_appears_under_its_name_when_it_is_done(tmp_path: Path) -> None:
    final = tmp_path / "deep/er/name"
    with publish_first(final) as temporary:
        temporary.write_text("half")
        assert not final.exists()
        assert temporary.parent == final.parent
    assert final.read_text() == "half"
    assert list(final.parent.iterdir()) == [final]
    assert final.stat().st_nlink == 1


def test_the_first_of_two_writers_stands(tmp_path: Path) -> None:
    final = tmp_path / "name"

    def finish_second() -> None:
        with publish_first(final) as temporary:
            temporary.write_text("second to finish")
            publish(final, "first to finish")

    with pytest.raises(FileExistsError):
        finish_second()
    assert final.read_text() == "first to finish"
    assert list(tmp_path.iterdir()) == [final]


@pytest.mark.parametrize("publisher", [publish_first, replace_whole])
def test_a_writer_that_fails_leaves_nothing(tmp_path: Path, publisher: Publisher) -> None:
    def fail() -> None:
        with publisher(tmp_path / "name") as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("publisher", [publish_first, replace_whole])
def test_content_reaches_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, publisher: Publisher
) -> None:
    order: list[str] = []
    link, replace, fsync = os.link, os.replace, os.fsync

    def noted_fsync(descriptor: int) -> None:
        order.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name.split('.')[-1]}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "link", lambda source, target: (order.append("name"), link(source, target)))
    monkeypatch.setattr(os, "replace", lambda source, target: (order.append("name"), replace(source, target)))
    folder = tmp_path / "folder"
    with publisher(folder / "file") as temporary:
        temporary.write_text("content")
    assert order == ["fsync tmp", "name", "fsync folder"]


def test_a_link_that_the_file_system_made_but_refused_counts_as_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def repeated(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", repeated)
    publish(tmp_path / "name", "mine")
    assert (tmp_path / "name").read_text() == "mine"
    with pytest.raises(FileExistsError):
        publish(tmp_path / "name", "another's")
    assert (tmp_path / "name").read_text() == "mine"


RACER = """
import sys
from pathlib import Path
from towline.storage.publish import publish_first
me, folder = sys.argv[1], Path(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for number in range(40):
    try:
        with publish_first(folder / str(number)) as temporary:
            temporary.write_text(me)
    except FileExistsError:
        continue
    print(number)
"""


def test_of_many_writers_at_once_exactly_one_wins_each_name(tmp_path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(me), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for me in range(4)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    won = [(number, str(me)) for me, racer in enumerate(racers) for number in racer.communicate(timeout=60)[0].split()]
    assert [racer.returncode for racer in racers] == [0, 0, 0, 0]
    assert sorted(int(number) for number, _ in won) == list(range(40))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict(won)


def test_a_reader_finds_the_old_or_the_new_content_and_nothing_between(tmp_path: Path) -> None:
    final = tmp_path / "state"
    contents = [str(number) * 50_000 for number in range(2)]
    final.write_text(contents[0])

    def rewrite() -> None:
        for number in range(60):
            with replace_whole(final) as temporary:
                temporary.write_text(contents[number % 2])

    writer = threading.Thread(target=rewrite)
    writer.start()
    while writer.is_alive():
        assert final.read_text() in contents
    writer.join()
    assert final.read_text() == contents[1]
    assert list(tmp_path.iterdir()) == [final]


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    kept = ["a.h5", ".a.h5", "b.12.0a1b2c3d.tmp", ".mine.tmp", "deep/c.tmp"]
    left = [".a.h5.12.0a1b2c3d.tmp", "deep/.b c.json.99999.ffffffff.tmp"]
    (tmp_path / "deep").mkdir()
    for name in kept + left:
        (tmp_path / name).touch()
    remove_leftovers(tmp_path)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(kept)
    remove_leftovers(tmp_path / "absent")


@pytest.mark.parametrize("publisher", [publish_first, replace_whole])
def test_what_a_killed_writer_leaves_is_known_as_a_leftover(tmp_path: Path, publisher: Publisher) -> None:
    with publisher(tmp_path / "name.json") as temporary:
        temporary.write_text("half")
        remove_leftovers(tmp_path)
        assert not temporary.exists()
        temporary.write_text("half")
