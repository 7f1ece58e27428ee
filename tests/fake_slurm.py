"""Slurm's commands as tiny scripts on the PATH: they print what a file says, and write down how they were called."""

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


@dataclass(frozen=True)
class FakeSlurm:
    folder: Path

    @classmethod
    def install(cls, folder: Path, monkeypatch: pytest.MonkeyPatch) -> "FakeSlurm":
        """Every command says nothing and succeeds."""
        fake = cls(folder)
        folder.mkdir()
        for name in ("squeue", "sacct", "scontrol", "scancel", "sbatch", "sinfo", "sacctmgr"):
            fake.answers(name, "")
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return fake

    def answers(self, name: str, *lines: str) -> None:
        self._write(name, f"cat {self._file(name, 'out', lines)}")

    def fails(self, name: str, message: str) -> None:
        self._write(name, f"cat {self._file(name, 'err', [message])} >&2; exit 1")

    def is_silent(self) -> None:
        """The controller and accounting are away."""
        for name in ("squeue", "sacct", "scontrol"):
            self.fails(name, SILENT)

    def queue(self, *rows: str) -> None:
        """Rows `ID|STATE|REASON|START|NODES|NODELIST|LEFT|SINCE|SCRIPT`."""
        self.answers("squeue", *rows)

    def calls(self, name: str) -> list[str]:
        path = self.folder / f"{name}.calls"
        return path.read_text().splitlines() if path.is_file() else []

    def _write(self, name: str, body: str) -> None:
        script = self.folder / name
        script.write_text(f'#!/bin/sh\necho "$*" >> {self.folder / name}.calls\n{body}\n')
        script.chmod(0o755)

    def _file(self, name: str, ending: str, lines: tuple[str, ...] | list[str]) -> Path:
        path = self.folder / f"{name}.{ending}"
        path.write_text("".join(f"{line}\n" for line in lines if line))
        return path
