"""Which checkpoints count, which stay, what they say of themselves and when they are refused."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from small_disk import small_disk
from towline.storage.checkpoints import (
    TrainingState,
    checkpoint_path,
    complete_steps,
    differences,
    list_files,
    mark_complete,
    model_identity,
    newest_step,
    read_state,
    remove_incomplete,
    retain,
    seal_files,
    verify_files,
)
from towline.storage.errors import CheckpointError, ModelError

STATE = TrainingState(
    step=3, wave=0, branch=2, version=3, stream_digest="ab12", seed=7, data="prompts-1", reference="sft-1",
    kl_beta=0.04, ranks=2, zero_stage=2, precision="bfloat16",
    optimizer={"adam_betas": [0.9, 0.95], "weight_decay": 0.0},
)  # fmt: skip


def begin(folder: Path, step: int) -> Path:
    path = checkpoint_path(folder, step)
    path.mkdir(parents=True)
    (path / "rank-0.pt").write_text("weights")
    return path


def save(folder: Path, *steps: int) -> None:
    for step in steps:
        begin(folder, step)
        seal(folder, step)


def seal(folder: Path, step: int) -> None:
    mark_complete(folder, step, replace(STATE, step=step), seal_files(folder, step, list_files(folder, step)))


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


def test_the_mark_names_state_and_every_file(tmp_path: Path) -> None:
    path = begin(tmp_path, 3)
    (path / "hf").mkdir()
    (path / "hf" / "config.json").write_text("{}")
    seal(tmp_path, 3)
    mark = json.loads((path / "complete.json").read_text())
    assert {name: record["bytes"] for name, record in mark["files"].items()} == {"rank-0.pt": 7, "hf/config.json": 2}
    assert mark["state"]["kl_beta"] == 0.04
    assert read_state(tmp_path, 3) == STATE


def test_a_state_survives_its_file_whatever_its_settings(tmp_path: Path) -> None:
    begin(tmp_path, 3)
    odd: dict[str, Any] = {"betas": (0.9, 1), "name": "adamw", "eps": 1e-8}
    mark_complete(tmp_path, 3, replace(STATE, optimizer=odd, kl_beta=0.1 + 0.2, seed=2**63, ranks=1), {})
    saved = read_state(tmp_path, 3)
    assert (saved.kl_beta, saved.seed) == (0.1 + 0.2, 2**63)
    assert differences(saved, replace(STATE, optimizer=odd, kl_beta=0.1 + 0.2, seed=2**63)) == []


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


# --- damage ------------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """A checkpoint of ten files of different sizes in two folders."""
    path = begin(tmp_path, 3)
    (path / "engine").mkdir()
    for number in range(9):
        (path / "engine" / f"{number}.pt").write_bytes(bytes(range(number + 1)))
    seal(tmp_path, 3)
    return tmp_path


def test_an_untouched_checkpoint_has_no_problems(many: Path) -> None:
    assert verify_files(many, 3) == []


@pytest.mark.parametrize("damage", ["missing", "shorter", "longer", "flipped"])
@pytest.mark.parametrize("name", ["engine/0.pt", "engine/8.pt", "rank-0.pt"])
def test_a_damaged_file_is_found_by_just_one_share(many: Path, name: str, damage: str) -> None:
    file = checkpoint_path(many, 3) / name
    content = file.read_bytes()
    changed = {"shorter": content[:-1], "longer": content + b"x", "flipped": bytes([content[0] ^ 1]) + content[1:]}
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(changed[damage])
    for parts in (1, 2, 3, 20):
        problems = [problem for part in range(parts) for problem in verify_files(many, 3, part=part, parts=parts)]
        assert len(problems) == 1
        assert str(file) in problems[0]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"step": 3, "ranks": 2}', b'{"state": {}, "files": {}}'])
def test_a_mark_that_cannot_be_read_is_refused_with_its_path(many: Path, content: bytes) -> None:
    mark = checkpoint_path(many, 3) / "complete.json"
    mark.write_bytes(content)
    with pytest.raises(CheckpointError, match=str(mark)):
        read_state(many, 3)
    with pytest.raises(CheckpointError, match="earlier checkpoint"):
        verify_files(many, 3)


def test_a_step_without_a_whole_checkpoint_is_refused_with_those_that_are(many: Path) -> None:
    begin(many, 4)
    for step in (4, 5):
        with pytest.raises(CheckpointError, match=rf"no whole checkpoint of step {step}. Whole ones: 3\."):
            read_state(many, step)


# --- what a resume would change ----------------------------------------------------------------------------------


def test_the_same_state_has_no_differences() -> None:
    assert differences(STATE, STATE) == []


@pytest.mark.parametrize("change", [{"ranks": 8}, {"branch": 5}, {"stream_digest": ""}])
def test_what_a_resume_may_change_is_no_difference(change: dict[str, Any]) -> None:
    assert differences(STATE, replace(STATE, **change)) == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"step": 4}, "data cursor (step): the checkpoint has 3, this run 4;"),
        ({"wave": 1}, "data cursor (wave): the checkpoint has 0, this run 1;"),
        ({"data": "prompts-2"}, "data cursor (dataset and schedule): the checkpoint has 'prompts-1', "),
        ({"version": 9}, "policy version: the checkpoint has 3, this run 9;"),
        ({"seed": 8}, "seed: the checkpoint has 7, this run 8; set seed"),
        ({"reference": "sft-2"}, "reference: the checkpoint has 'sft-1', this run 'sft-2';"),
        ({"kl_beta": 0.0}, "KL coefficient: the checkpoint has 0.04, this run 0.0; set trainer.kl_beta"),
        ({"zero_stage": 3}, "optimiser state (ZeRO stage): the checkpoint has 2, this run 3; set trainer.zero_stage"),
        ({"lora": "rank 8"}, "adapters: the checkpoint has '', this run 'rank 8'; set [trainer.lora]"),
        ({"precision": "float32"}, "precision: the checkpoint has 'bfloat16', this run 'float32';"),
        (
            {"optimizer": {"adam_betas": [0.9, 0.999], "weight_decay": 0.0}},
            "optimiser state (adam_betas): the checkpoint has [0.9, 0.95], this run [0.9, 0.999]; set trainer.",
        ),
        ({"optimizer": {"adam_betas": [0.9, 0.95]}}, "optimiser state (weight_decay): the checkpoint has 0.0, this"),
    ],
)  # fmt: skip
def test_each_part_that_would_change_is_named_with_both_values(change: dict[str, Any], part: str) -> None:
    (text,) = differences(STATE, replace(STATE, **change))
    assert text.startswith(part)


def test_all_differences_are_told_at_once() -> None:
    assert len(differences(STATE, replace(STATE, seed=1, kl_beta=1.0, optimizer={}))) == 4


# --- identity of a model folder ----------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 4}')
    (folder / "model-1.safetensors").write_bytes(bytes(3 << 20))
    (folder / "model-2.safetensors").write_bytes(b"short")
    (folder / "README.md").write_text("about")
    return folder


def test_a_copied_model_folder_is_the_same_model(model: Path) -> None:
    shutil.copytree(model, model.parent / "copy")
    (model.parent / "copy" / "README.md").write_text("about a copy")
    assert model_identity(model.parent / "copy") == model_identity(model)


@pytest.mark.parametrize(
    ("name", "position", "value"),
    [("config.json", 1, b"'"), ("model-1.safetensors", 0, b"x"), ("model-1.safetensors", (3 << 20) - 1, b"x"),
     ("model-1.safetensors", 3 << 20, b"x"), ("model-2.safetensors", 4, b"x"), ("model-3.safetensors", 0, b"x")],
)  # fmt: skip
def test_another_model_has_another_identity(model: Path, name: str, position: int, value: bytes) -> None:
    before = model_identity(model)
    with (model / name).open("r+b" if (model / name).exists() else "wb") as file:
        file.seek(position)
        file.write(value)
    assert model_identity(model) != before


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no weights"):
        model_identity(tmp_path)


# --- a full disk -------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "256k") as is_mounted:
        if not is_mounted:
            pytest.skip("mounting a small file system is refused")
        yield tmp_path / "disk"


def test_a_mark_that_does_not_fit_on_the_disk_leaves_the_step_unmarked(tiny_disk: Path) -> None:
    save(tiny_disk, 2)
    (record,) = seal_files(tiny_disk, 2, ["rank-0.pt"]).values()
    files = {f"{number}.pt": record for number in range(3000)}
    begin(tiny_disk, 3)
    with pytest.raises(OSError, match="No space left"):
        mark_complete(tiny_disk, 3, STATE, files)
    assert complete_steps(tiny_disk) == [2]
    assert [path.name for path in checkpoint_path(tiny_disk, 3).iterdir()] == ["rank-0.pt"]
    assert verify_files(tiny_disk, 2) == []
