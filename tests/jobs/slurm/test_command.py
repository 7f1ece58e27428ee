import os
from pathlib import Path

import pytest

from towline.jobs.slurm.command import slurm
from towline.storage.errors import SlurmError


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a shell script on PATH under the name of one of Slurm's commands."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(name: str, body: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    return make


def test_the_output_is_returned(command) -> None:
    command("squeue", 'printf "%s|" "$@"')
    assert slurm(["squeue", "--me", "-o", "%i %T"]) == "--me|-o|%i %T|"


def test_a_failure_names_command_status_words_and_cure(command) -> None:
    command("sbatch", 'echo "sbatch: error: invalid partition specified: gpuu" >&2; exit 1')
    with pytest.raises(SlurmError) as error:
        slurm(["sbatch", "my job.sh"])
    assert str(error.value).splitlines() == [
        "`sbatch 'my job.sh'` ended with 1: sbatch: error: invalid partition specified: gpuu",
        "What to do: `sinfo -s` lists the partitions.",
    ]


def test_a_failure_without_known_words_is_told_as_it_is(command) -> None:
    command("scancel", "exit 3")
    with pytest.raises(SlurmError, match=r"^`scancel 7` ended with 3: it said nothing$"):
        slurm(["scancel", "7"])


def test_a_missing_command_is_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match=r"scontrol is not on PATH here.*container"):
        slurm(["scontrol", "requeue", "7"])


def test_a_silent_command_is_ended(command) -> None:
    command("sacct", "exec sleep 30")
    with pytest.raises(SlurmError, match=r"did not answer within 0\.2 s"):
        slurm(["sacct"], timeout_s=0.2)


def test_display_settings_of_the_user_do_not_reach_the_command(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQUEUE_PARTITION", "mine")
    monkeypatch.setenv("SLURM_CONF", "/somewhere")
    command("squeue", 'echo "${SQUEUE_PARTITION-none} $SLURM_CONF"')
    assert slurm(["squeue"]) == "none /somewhere\n"


def test_another_environment_replaces_ours(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    command("sbatch", 'echo "${SLURM_JOB_ID-none}"')
    assert slurm(["sbatch"], environment={"PATH": os.environ["PATH"]}) == "none\n"
