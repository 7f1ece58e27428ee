import argparse
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from towline.launcher.cli import command, make_parser

COMMAND = [sys.executable, "-P", "-m", "towline.launcher.cli"]
HEAVY = ["torch", "vllm", "deepspeed", "transformers", "mpi4py", "pydantic", "numpy", "h5py", "matplotlib", "rich"]


def verbs() -> dict[str, argparse.ArgumentParser]:
    (choices,) = [action.choices for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return choices


def options_of(verb: argparse.ArgumentParser) -> list[str]:
    return sorted(action.option_strings[0] if action.option_strings else action.dest for action in verb._actions)


def test_verbs_and_their_options_are_frozen() -> None:
    assert {name: options_of(verb) for name, verb in verbs().items()} == {
        "run": ["-h", "-o", "file"],
        "submit": ["--cluster", "--dry-run", "--smoke", "-h", "-o", "file"],
        "resume": ["--root", "-h", "-o", "run"],
        "check": ["--cluster", "-h", "-o", "file"],
        "doctor": ["-h"],
        "status": ["--follow", "--root", "-h", "run"],
        "logs": ["--attempt", "--follow", "--root", "-h", "-n", "process", "run"],
        "cancel": ["--now", "--root", "-h", "run"],
        "samples": ["--failed", "--num", "--root", "--step", "--tokens", "-h", "run"],
        "score": [
            "--compare",
            "--dry-run",
            "--fields",
            "--limit-s",
            "--mpi",
            "--output",
            "--rewards",
            "--root",
            "--workers",
            "-h",
            "what",
        ],
        "ledger": ["--root", "-h", "run"],
        "replay": ["--root", "--step", "-h", "run"],
    }


def test_help_takes_less_than_half_a_second_of_processor_time() -> None:
    before = processor_seconds()
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True, check=True)
    assert processor_seconds() - before < 0.5
    assert all(name in done.stdout for name in verbs())


def processor_seconds() -> float:
    """Of the children that have ended; unlike the clock it does not depend on what else the machine does."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_help_imports_nothing_heavy() -> None:
    code = f"""
import sys
from towline.launcher.cli import command
try:
    command(["--help"])
except SystemExit:
    print("found", [name for name in {HEAVY} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("found []\n")


def test_bad_input_exits_with_2_and_its_message_on_stderr(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    done = subprocess.run([*COMMAND, "run", str(missing)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"{missing}: No such file or directory.\n")


def test_overrides_may_be_repeated() -> None:
    options = make_parser().parse_args(["run", "x.toml", "-o", "steps=1", "-o", "seed=2"])
    assert options.overrides == ["steps=1", "seed=2"]
    assert make_parser().parse_args(["run", "x.toml"]).overrides == []


@pytest.mark.parametrize(
    "argv",
    [
        ["replay"],
        ["samples", "--step", "-1"],
        ["submit"],
        ["score", "--workers", "0"],
        ["score", "--limit-s", "nan"],
        [],
    ],
)
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(argv)
    assert ended.value.code == 2
    assert "usage: towline" in capsys.readouterr().err


def test_an_interrupt_before_anything_ran_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(options: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("towline.launcher.cli._status", interrupt)
    assert command(["status"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_run_on_a_login_node_is_refused_with_the_command_to_use(
    project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("TOWLINE_ALLOW_LOGIN", raising=False)
    assert command(["run", str(project.file)]) == 2
    said = capsys.readouterr().err
    assert f"\n  towline submit {project.file} --cluster PROFILE\n" in said
    assert f"sbatch --nodes=1 --exclusive --wrap 'towline run {project.file}'" in said
    assert "TOWLINE_ALLOW_LOGIN=1" in said
    monkeypatch.setenv("TOWLINE_CLUSTER", "big")
    assert command(["run", str(project.file)]) == 2
    assert f"\n  towline submit {project.file}\n" in capsys.readouterr().err
    assert not project.runs.exists()


@pytest.mark.parametrize("variable", ["SLURM_JOB_ID", "TOWLINE_ALLOW_LOGIN"])
def test_run_in_an_allocation_is_not_a_login_node(
    project, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("TOWLINE_ALLOW_LOGIN")
    monkeypatch.setenv(variable, "1")
    project.file.write_text("")
    assert command(["run", str(project.file)]) == 2
    assert "objective is missing" in capsys.readouterr().err
