"""What a process finds on its node before its role is imported."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from towline.jobs.slurm.task import _CACHES, choose_gpus, hide_mpi, node_local_folder, stage, use_caches


@pytest.mark.parametrize(
    ("mine", "shown", "expected"), [("0:1", "0,1,2,3", "0"), ("2:2", "0,1,2,3", "2,3"), ("1:1", "GPU-a,GPU-b", "GPU-b")]
)
def test_a_process_sees_its_own_gpus_only(mine: str, shown: str, expected: str):
    environment = {"TOWLINE_GPUS": mine, "CUDA_VISIBLE_DEVICES": shown}
    choose_gpus(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == expected


def test_a_node_with_too_few_gpus_ends_the_process_before_it_takes_another_ones():
    with pytest.raises(SystemExit, match=r"needs GPUs 2 to 3 of its node, and Slurm shows it \['0', '1', '2'\]"):
        choose_gpus({"TOWLINE_GPUS": "2:2", "CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_without_gpus_nothing_is_chosen():
    environment = {"CUDA_VISIBLE_DEVICES": "0"}
    choose_gpus(environment)
    assert environment == {"CUDA_VISIBLE_DEVICES": "0"}


def test_a_process_that_is_no_rank_sees_no_mpi():
    environment = {"PMIX_RANK": "0", "PMI_SIZE": "4", "OMPI_X": "1", "PATH": "p", "SLURM_PROCID": "0"}
    hide_mpi(environment)
    assert environment == {"PATH": "p", "SLURM_PROCID": "0"}


def test_caches_lie_on_the_node_in_a_folder_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SCRATCH_OF_NODE", str(tmp_path))
    environment = {"TOWLINE_NODE_LOCAL": "$SCRATCH_OF_NODE/towline", "TOWLINE_JOB": "77", "TRITON_CACHE_DIR": "/given"}
    folder = node_local_folder(environment)
    assert folder.parent == tmp_path / "towline"
    assert folder.name.endswith("-77")
    assert folder.stat().st_mode & 0o777 == 0o700
    use_caches(folder, environment)
    assert environment["TRITON_CACHE_DIR"] == "/given"
    assert Path(environment["TORCH_EXTENSIONS_DIR"]).is_relative_to(folder)


@pytest.mark.parametrize("name", [*_CACHES, "TMPDIR"])
def test_every_cache_of_a_compiler_is_the_jobs_and_the_nodes(name: str, tmp_path: Path):
    # case G4-24: HOME is NFS without a free byte
    environment = {"TOWLINE_NODE_LOCAL": str(tmp_path), "TOWLINE_JOB": "77", "HOME": "/nfs/full"}
    use_caches(node_local_folder(environment), environment)
    place = Path(environment[name])
    assert place.is_relative_to(tmp_path)
    assert "77" in place.relative_to(tmp_path).parts[0]
    assert environment["HOME"] == "/nfs/full"


def test_a_process_starts_without_a_home_and_finds_the_hub_where_the_profile_says(tmp_path: Path):
    # case G4-24: nobody, not even root, can write below /dev/null
    (tmp_path / "role.py").write_text(
        "import json, os, pathlib\n"
        "for name in ('TRITON_CACHE_DIR', 'XDG_CACHE_HOME'):\n"
        "    pathlib.Path(os.environ[name], 'kernel').mkdir(parents=True)\n"
        "print(json.dumps([os.environ[name] for name in ('HOME', 'HF_HOME', 'TRITON_CACHE_DIR')]))\n"
    )
    (tmp_path / "node").mkdir()
    variables = {"TOWLINE_MPI": "none", "TOWLINE_JOB": "77", "TOWLINE_NODE_LOCAL": str(tmp_path / "node")}
    environment = {**variables, "PYTHONPATH": str(tmp_path), "HOME": "/dev/null/home", "HF_HOME": "/shared/hub"}
    command = [sys.executable, "-m", "towline.jobs.slurm.task", "role"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    home, hub, triton = json.loads(done.stdout)
    assert (home, hub) == ("/dev/null/home", "/shared/hub")
    assert Path(triton).is_relative_to(tmp_path / "node")


def test_a_variable_that_the_node_does_not_have_means_tmp(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    folder = node_local_folder({"TOWLINE_NODE_LOCAL": "$NO_SUCH_VARIABLE", "TOWLINE_JOB": "test-of-the-task"})
    assert folder.parent == Path("/tmp")
    folder.rmdir()


def test_the_model_is_copied_once_whoever_comes_first(tmp_path: Path):
    source = tmp_path / "shared" / "model"
    source.mkdir(parents=True)
    (source / "weights").write_bytes(b"x" * 1_000_000)
    (tmp_path / "node" / "model.half").mkdir(parents=True)  # of a process that was killed while it copied
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(stage(source, tmp_path / "node"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {tmp_path / "node" / "model"}
    assert (found[0] / "weights").read_bytes() == b"x" * 1_000_000
    inode = (found[0] / "weights").stat().st_ino
    assert (stage(source, tmp_path / "node") / "weights").stat().st_ino == inode


def test_signals_for_the_batch_step_do_not_end_a_process_that_still_imports(tmp_path: Path):
    (tmp_path / "role.py").write_text(
        "import json, os, signal, sys\nos.kill(os.getpid(), signal.SIGUSR2)\nprint(json.dumps(sys.argv[1:]))\n"
    )
    # case G4-20
    arguments = ["a b", "it's", 'x"y', "$HOME", "r(1)", "50%x", ""]
    command = [sys.executable, "-m", "towline.jobs.slurm.task", "role", *arguments]
    variables = {"TOWLINE_MPI": "none", "TOWLINE_JOB": "1", "TOWLINE_NODE_LOCAL": str(tmp_path)}
    environment = {"PYTHONPATH": str(tmp_path), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout, done.stderr
    assert json.loads(done.stdout) == arguments
