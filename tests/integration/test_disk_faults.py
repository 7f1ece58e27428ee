"""What is on disk may be damaged or run full: nothing sealed is lost, nothing damaged is read, and a resume mends it.

As in the fault matrix the trainer is real, the engine is scripted, and the bits in the end are those of a run that
nothing happened to.
"""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.bits import differences
from integration.fault_runs import begun, held
from integration.runs import MODEL, LiveRun
from small_disk import small_disk
from towline.storage.checkpoints import complete_steps, verify_files
from towline.storage.run_directory import RunDirectory
from towline.storage.set_aside import list_aside

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/tiny-sort is missing: run env/setup.sh"),
]
DISK_BYTES = 160 * 2**20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", f"{DISK_BYTES}") as is_mounted:
        if not is_mounted:
            pytest.skip("mounting a small file system is refused")
        yield tmp_path / "disk"


def fill(disk: Path, *, leave_bytes: int) -> Path:
    """A file that takes all space but so much."""
    filler = disk / "filler"
    status = os.statvfs(disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - leave_bytes)
    return filler


@pytest.mark.parametrize(
    ("leave_bytes", "full_while"),
    [(4096, "sealing"), pytest.param(3 * 2**20, "checkpointing", marks=pytest.mark.matrix)],
)
def test_a_full_disk_ends_the_run_with_all_that_was_sealed_and_it_goes_on_when_there_is_room(
    undisturbed: Path, disk: Path, leave_bytes: int, full_while: str
):
    with begun(disk) as run:
        with held(run, "training"):
            before = {path: path.read_bytes() for path in (run.folder / "rollouts").rglob("chunk-*.h5")}
            kept = complete_steps(run.folder / "checkpoints")
            filler = fill(disk, leave_bytes=leave_bytes)
        assert run.wait() in (1, 3), run.text
        run.wait_until_gone(30)
        assert "No space left" in run.text or "bytes are free" in run.text, run.text
        assert {path: path.read_bytes() for path in before} == before
        for step in kept[-1:]:
            assert verify_files(run.folder / "checkpoints", step) == []
        filler.unlink()
        run.resume()
        assert run.wait() == 0, run.text
        assert differences(undisturbed, run.folder) == []
        assert not list(run.folder.rglob(".*.tmp"))


def test_damaged_shards_are_set_aside_and_generated_again(undisturbed: Path, tmp_path: Path):
    with begun(tmp_path) as run:
        run.wait_until(lambda: len(run.rows) >= 4, "fourth step")
        run.find("trainer.0").send_signal(signal.SIGKILL)
        run.wait()
        checkpoint = complete_steps(run.folder / "checkpoints")[-1]
        step = run.folder / "rollouts" / f"step-{checkpoint:06d}" / "wave-0"
        if not step.is_dir():  # the fault came before any shard of the step: then there is nothing to damage
            pytest.skip("no shard after the checkpoint")
        flipped, truncated = step / "chunk-000.h5", step / "chunk-001.h5"
        _flip(flipped)
        truncated.write_bytes(truncated.read_bytes()[:-100])
        run.resume()
        assert run.wait() == 0, run.text
        aside = list_aside(RunDirectory(run.folder))
        assert {one.path for one in aside} >= {str(path.relative_to(run.folder)) for path in (flipped, truncated)}
        assert run.text.count("is set aside") >= 2
        assert differences(undisturbed, run.folder) == []


def test_a_checkpoint_that_does_not_hold_what_it_says_is_refused(tmp_path: Path):
    """By the digest of its weights before an engine has them, and by that of a file before any is loaded."""
    with begun(tmp_path) as run:
        run.find("trainer.0").send_signal(signal.SIGKILL)
        assert run.wait() == 3
        newest = complete_steps(run.folder / "checkpoints")[-1]
        states = sorted((run.folder / "checkpoints" / f"step-{newest:06d}" / "engine").glob("*optim_states.pt"))
        mark = run.folder / "checkpoints" / f"step-{newest:06d}" / "complete.json"
        saved, lineage = mark.read_text(), (run.folder / "lineage.jsonl").read_bytes()
        mark.write_text(saved.replace(json.loads(saved)["state"]["stream_digest"], "0" * 64))
        run.resume()
        assert run.wait() == 3, run.text
        assert "the policy that was loaded is not the one that was saved" in run.text
        assert (run.folder / "lineage.jsonl").read_bytes() == lineage
        mark.write_text(saved)
        _flip(states[0])
        run.resume()
        assert run.wait() == 3, run.text
        assert states[0].name in run.text


def test_another_number_of_ranks_goes_on_and_says_that_bits_may_differ(undisturbed: Path, tmp_path: Path):
    with begun(tmp_path) as run:
        run.find("trainer.0").send_signal(signal.SIGKILL)
        assert run.wait() == 3
        run.resume("local.trainer_ranks=1")
        assert run.wait() == 0, run.text
        logs = "".join(path.read_text() for path in (run.folder / "logs" / "attempt-1").glob("trainer.*.log"))
        assert "bits may differ" in logs + run.text
        theirs = LiveRun.__new__(LiveRun)
        theirs.folder = undisturbed
        for mine, other in zip(run.rows, theirs.rows, strict=True):
            assert mine["loss/policy"] == pytest.approx(other["loss/policy"], abs=2e-4)


def _flip(path: Path) -> None:
    """One bit at each of 32 places: a single one may lie in a gap of the file."""
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 64, len(data), len(data) // 32):
        data[place] ^= 1
    path.write_bytes(data)
