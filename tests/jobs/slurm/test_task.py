"""What a process finds on its node before its role is imported."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from towline.jobs.slurm.task import choose_gpus, hide_mpi, node_local_folder, stage, use_caches


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
    (tmp_path / "role.py").write_text("import os, signal, sys\nos.kill(os.getpid(), signal.SIGUSR2)\nprint(sys.argv)\n")
    command = [sys.executable, "-m", "towline.jobs.slurm.task", "role", "a b", "3"]
    variables = {"TOWLINE_MPI": "none", "TOWLINE_JOB": "1", "TOWLINE_NODE_LOCAL": str(tmp_path)}
    environment = {"PYTHONPATH": str(tmp_path), **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("role.py', 'a b', '3']"), done.stderr
