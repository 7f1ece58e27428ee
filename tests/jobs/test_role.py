"""What a process leaves behind when it ends by an exception, wherever there is room for it."""

import errno
import io
import json
import sys
from pathlib import Path

from towline.jobs.role import _record_fault
from towline.storage.errors import CheckpointError

ERROR = CheckpointError("checkpoint 8 could not be written")


def test_a_fault_is_written_to_the_run_folder(run, store, tmp_path: Path):
    log = tmp_path / "trainer.0.log"
    log.write_text("one\ntwo\n")
    _record_fault(run, 0, "trainer.0", 2, log, ERROR, store)
    fault = json.loads((run.faults(0) / "trainer.0.2.json").read_text())
    assert (fault["process"], fault["life"], fault["error"]) == ("trainer.0", 2, "CheckpointError")
    assert (fault["message"], fault["log"]) == (str(ERROR), f"{log}:2")
    assert store.get("fault/trainer.0") is None


def test_a_fault_that_finds_no_room_on_the_disk_is_told_to_the_supervisor(run, store, tmp_path: Path):
    run.logs(0).mkdir(parents=True)
    run.faults(0).write_text("a file where the folder should be")
    log = tmp_path / "trainer.0.log"
    log.touch()
    _record_fault(run, 0, "trainer.0", 0, log, ERROR, store)
    assert store.get("fault/trainer.0")["message"] == str(ERROR)


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_it_is_told_too_where_the_log_itself_finds_no_room(run, store, tmp_path: Path, monkeypatch):
    run.logs(0).mkdir(parents=True)
    run.faults(0).write_text("a file where the folder should be")
    log = tmp_path / "trainer.0.log"
    log.touch()
    monkeypatch.setattr(sys, "stderr", FullDisk())
    _record_fault(run, 0, "trainer.0", 0, log, ERROR, store)
    monkeypatch.undo()
    assert store.get("fault/trainer.0")["message"] == str(ERROR)
