"""What happens on a compute node before a role is imported: its GPUs, its caches, its model.

python -P -m towline.jobs.slurm.task MODULE ARGUMENTS
"""

import fcntl
import json
import os
import runpy
import shutil
import signal
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

from towline.storage.run_directory import RunDirectory

_CACHES = (
    *("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"),
    *("FLASHINFER_WORKSPACE_BASE", "TILELANG_CACHE_DIR", "VLLM_CACHE_ROOT", "XDG_CACHE_HOME"),
)
"""Compilers write them with locks that shared file systems break, and the home folder may be full or read-only."""
CLEAR = "clear"
"""In place of a module: remove what the job left on the node's disk."""
_PARTS = ("OMPI_", "PMIX_", "PMI_", "PMI2_", "PRTE_")


def main() -> None:
    os.environ["TOWLINE_BEGAN"] = str(time.time())
    # What others send is ignored until the role has its own handlers; by default these would end the process.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    module, *arguments = sys.argv[1:]
    if module == CLEAR:
        shutil.rmtree(node_local_folder(os.environ), ignore_errors=True)
        return
    choose_gpus(os.environ)
    if os.environ["TOWLINE_MPI"] == "none":
        hide_mpi(os.environ)
    folder = node_local_folder(os.environ)
    use_caches(folder, os.environ)
    if os.environ.get("TOWLINE_STAGE_MODEL"):
        experiment = json.loads(RunDirectory(Path(os.environ["TOWLINE_RUN"])).config.read_text())
        os.environ["TOWLINE_MODEL"] = str(stage(Path(experiment["policy"]["model"]), folder / "models"))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def choose_gpus(environment: MutableMapping[str, str]) -> None:
    """Keep the process's own of the GPUs that Slurm shows on this node."""
    if "TOWLINE_GPUS" not in environment:
        return
    first, count = map(int, environment["TOWLINE_GPUS"].split(":"))
    shown = [gpu for gpu in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    mine = shown[first : first + count]
    if len(mine) < count:
        sys.exit(
            f"{os.uname().nodename}: this process needs GPUs {first} to {first + count - 1} of its node, and Slurm "
            f"shows it {shown or 'none'} (CUDA_VISIBLE_DEVICES). Ask for more in the profile: sbatch gpus-per-node."
        )
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)


def hide_mpi(environment: MutableMapping[str, str]) -> None:
    """A process that is not a rank must not take itself for one."""
    for name in [name for name in environment if name.startswith(_PARTS)]:
        del environment[name]


def node_local_folder(environment: MutableMapping[str, str]) -> Path:
    """One folder a job on this node's own disk; readable by its owner only."""
    text = os.path.expandvars(environment.get("TOWLINE_NODE_LOCAL", ""))
    base = Path(text) if text and "$" not in text else Path("/tmp")
    folder = base / f"towline-{os.getuid()}-{environment['TOWLINE_JOB']}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def use_caches(folder: Path, environment: MutableMapping[str, str]) -> None:
    """What the profile's `software.env` sets stays."""
    for name in _CACHES:
        environment.setdefault(name, str(folder / name.lower()))
    environment.setdefault("TMPDIR", str(folder))


def stage(source: Path, folder: Path) -> Path:
    """Copy the model to this node once; the processes of the node wait for the first of them."""
    folder.mkdir(parents=True, exist_ok=True)
    staged = folder / source.name
    with (folder / f"{source.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not staged.is_dir():
            half = folder / f"{source.name}.half"
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(source, half)
            half.rename(staged)
    return staged


if __name__ == "__main__":
    main()
