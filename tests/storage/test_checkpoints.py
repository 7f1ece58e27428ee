"""Which checkpoints count, and which stay."""

import json
from pathlib import Path

import pytest

from towline.storage.checkpoints import (
    checkpoint_path,
    complete_steps,
    mark_complete,
    newest_step,
    remove_incomplete,
    retain,
)


def begin(folder: Path, step: int) -> Path:
    path = checkpoint_path(folder, step)
    path.mkdir(parents=True)
    (path / "rank-0.pt").write_text("weights")
    return path


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        begin(folder, step)
        mark_complete(folder, step, {"step": step})


def test_complete_checkpoints_are_listed_by_number(tmp_path: Path) -> None:
    save(tmp_path, 999_999, 2, 1_000_000, 10)
    assert complete_steps(tmp_path) == [2, 10, 999_999, 1_000_000]
    assert newest_step(tmp_path) == 1_000_000
    assert newest_step(tmp_path, at_most=10) == 10
    assert newest_step(tmp_path, at_most=9) == 2
    assert newest_step(tmp_path, at_most=1) is None


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert complete_steps(tmp_path / "absent") == []
    assert newest_step(tmp_path) is None


def test_a_checkpoint_cut_short_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = begin(tmp_path, 2)
    (path / ".complete.json.12.0a1b2c3d.tmp").touch()
    for name in ("step-3", "step-latest", "step-000004.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "complete.json").touch()
    (tmp_path / "step-000005").touch()
    assert complete_steps(tmp_path) == [1]
    assert newest_step(tmp_path) == 1


def test_the_mark_says_what_it_was_given(tmp_path: Path) -> None:
    begin(tmp_path, 3)
    mark_complete(tmp_path, 3, {"step": 3, "ranks": 2})
    assert json.loads((tmp_path / "step-000003/complete.json").read_text()) == {"step": 3, "ranks": 2}


def test_what_a_dead_writer_left_of_a_step_is_cleared(tmp_path: Path) -> None:
    begin(tmp_path, 4)
    remove_incomplete(tmp_path, 4)
    assert list(tmp_path.iterdir()) == []
    remove_incomplete(tmp_path, 4)


def test_a_complete_checkpoint_is_never_cleared_as_a_leftover(tmp_path: Path) -> None:
    save(tmp_path, 4)
    remove_incomplete(tmp_path, 4)
    assert (checkpoint_path(tmp_path, 4) / "rank-0.pt").is_file()


@pytest.mark.parametrize(
    ("keep", "removed"), [(1, [1, 2, 3]), (2, [1, 2]), (3, [1]), (4, []), (9, []), (0, [1, 2, 3, 10])]
)
def test_the_newest_are_kept(tmp_path: Path, keep: int, removed: list[int]) -> None:
    save(tmp_path, 10, 2, 3, 1)
    assert retain(tmp_path, keep) == removed
    kept = [step for step in (1, 2, 3, 10) if step not in removed]
    assert complete_steps(tmp_path) == kept
    assert sorted(tmp_path.iterdir()) == [checkpoint_path(tmp_path, step) for step in kept]


def test_pinned_checkpoints_are_kept_beside_the_newest(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    assert retain(tmp_path, 1, is_pinned=lambda step: step == 2) == [1, 3]
    assert complete_steps(tmp_path) == [2, 4]


def test_retaining_clears_what_was_cut_short_before_the_newest_and_spares_what_is_being_written(
    tmp_path: Path,
) -> None:
    save(tmp_path, 2, 3)
    begin(tmp_path, 1)
    begin(tmp_path, 4)
    assert retain(tmp_path, 2) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003", "step-000004"]


def test_a_first_checkpoint_being_written_is_spared(tmp_path: Path) -> None:
    begin(tmp_path, 1)
    assert retain(tmp_path, 1) == []
    assert checkpoint_path(tmp_path, 1).is_dir()


def test_a_removal_cut_short_leaves_nothing_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        retain(tmp_path, 1)
    assert complete_steps(tmp_path) == [2]
