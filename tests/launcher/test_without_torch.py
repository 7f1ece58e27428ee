"""The launcher on a login node, where neither torch nor an engine is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from towline.storage.run_directory import RunDirectory

LAUNCHER = Path(__file__).resolve().parents[2] / "launcher"
HIDDEN = ["torch", "vllm", "deepspeed", "mpi4py", "transformers", "tokenizers"]
SITECUSTOMIZE = f"""
import importlib.machinery, sys

class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {HIDDEN} else super().find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is importlib.machinery.PathFinder else finder for finder in sys.meta_path]
"""


@pytest.fixture
def login_node(tmp_path: Path) -> dict[str, str]:
    """An environment in which the heavy packages look as if they were not installed."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "TOWLINE_ALLOW_LOGIN": "1"}


def towline(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "towline.launcher.cli", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_packages_are_hidden_indeed(login_node: dict[str, str]) -> None:
    code = f"import importlib.util; print([name for name in {HIDDEN} if importlib.util.find_spec(name)])"
    done = subprocess.run([sys.executable, "-c", code], env=login_node, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_every_module_can_be_imported(login_node: dict[str, str]) -> None:
    files = sorted(path.relative_to(LAUNCHER) for path in LAUNCHER.rglob("*.py") if path.stem != "__init__")
    modules = [".".join(("towline.launcher", *file.with_suffix("").parts)) for file in files]
    assert "towline.launcher.preflight" in modules
    code = f"import importlib\nfor name in {modules}: importlib.import_module(name)"
    subprocess.run([sys.executable, "-P", "-c", code], env=login_node, check=True)


def test_status_and_samples_work(run: RunDirectory, login_node: dict[str, str]) -> None:
    for verb, text in (("status", "small-1  DONE"), ("samples", "small-1  step 2")):
        done = towline(login_node, verb, str(run.root))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(text)


def test_score_works(run: RunDirectory, tmp_path: Path, login_node: dict[str, str]) -> None:
    (tmp_path / "rewards.toml").write_text('[[rewards]]\nuse = "exact_match"\nweight = 1.0\n')
    (tmp_path / "answers.jsonl").write_text('{"completion": "\\\\boxed{7}", "answer": "7"}\n')
    rewards = ["--rewards", str(tmp_path / "rewards.toml"), "--workers", "1"]
    for what, text in (
        (str(tmp_path / "answers.jsonl"), "1 completions of 1 lines"),
        (str(run.root), "small-1   3 shards"),
    ):
        done = towline(login_node, "score", what, *rewards)
        assert (done.returncode, done.stderr) == (0, "")
        assert text in done.stdout
    done = towline(login_node, "score", str(run.root), *rewards, "--mpi")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--mpi needs mpi4py and an MPI library (No module named 'mpi4py')")


def test_check_works_and_says_what_it_could_not_count(project, login_node: dict[str, str]) -> None:
    done = towline(login_node, "check", str(project.file))
    assert (done.returncode, done.stderr) == (0, "")
    assert "characters: 3 median" in done.stdout
    assert "tokens of the prompts were not counted: transformers is not installed here" in done.stdout


def test_a_job_for_a_cluster_is_checked_and_written(project, slurm, login_node: dict[str, str]) -> None:
    environment = login_node | {"PATH": os.environ["PATH"]}
    done = towline(environment, "check", str(project.file), "--cluster", "dev")
    assert (done.returncode, done.stderr) == (0, "")
    assert "layout  heterogeneous job: trainer 1 node + rollout 1 node" in done.stdout
    done = towline(environment, "submit", str(project.file), "--cluster", "dev", "--dry-run", "-o", "run.name=dry")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (project.runs / "dry" / "slurm" / "callable.sh").read_text()
    assert "Nothing was submitted." in done.stderr
    assert slurm.calls("sbatch") == []


def test_run_names_what_is_missing(project, login_node: dict[str, str]) -> None:
    done = towline(login_node, "run", str(project.file))
    assert done.returncode == 2
    assert "torch, transformers, deepspeed, mpi4py, vllm cannot be imported by" in done.stderr
    assert not project.runs.exists()
