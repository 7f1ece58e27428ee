"""What srun is told, and what it is not: seen by a srun that writes down its words and its environment."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from towline.jobs.launch import ProcessSpec
from towline.jobs.slurm.placement import Place
from towline.jobs.slurm.profile import ClusterProfile
from towline.jobs.slurm.srun import SrunLauncher, address_of
from towline.storage.errors import InputError

FAKE_SRUN = f"""#!{sys.executable}
import json, os, sys, time
with open(os.environ["SAID"], "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
time.sleep(float(os.environ.get("SLEEPS", "0")))
"""
ENVIRONMENT = {
    "SLURM_JOB_ID": "12",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "12",
    "SLURM_JOB_ID_HET_GROUP_1": "13",
    "SLURM_CONF": "/etc/slurm.conf",
    "SLURM_JOB_GPUS": "0,1",
    "SLURM_NTASKS": "2",
    "SLURM_CPU_BIND": "quiet,mask_cpu:0x3",
    "SLURM_MEM_PER_NODE": "8192",
    "SLURM_CPUS_PER_TASK": "2",
    "SRUN_CPUS_PER_TASK": "3",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "PMIX_RANK": "0",
    "RANK": "5",
    "MASTER_PORT": "1",
}
GROUPS = {
    "trainer": Place(nodes=("t1", "t2"), per_node=4, het_group=0, gpus_per_process=1, cpus_per_process=16, options={}),
    "rollout": Place(
        nodes=("g1", "g2"), per_node=2, het_group=1, gpus_per_process=2, options={"mem": 0, "overlap": False}
    ),
}


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "srun").write_text(FAKE_SRUN)
    (tmp_path / "srun").chmod(0o755)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SAID", str(tmp_path / "said.json"))
    return tmp_path / "said.json"


def profile(**fields: Any) -> ClusterProfile:
    return ClusterProfile.model_validate_json(json.dumps({"name": "x", **fields}))


def spec(tmp_path: Path, name: str, **fields: Any) -> ProcessSpec:
    environment = {"TOWLINE_LIFE": "1", "OMP_NUM_THREADS": "3"}
    return ProcessSpec(
        name=name, module="towline.jobs.x_role", environment=environment, log=tmp_path / "x.log", **fields
    )


def start(launcher: SrunLauncher, wanted: ProcessSpec, said: Path) -> tuple[list[str], dict[str, str]]:
    process = launcher.start(wanted)
    while process.poll() is None:
        time.sleep(0.01)
    words, environment = json.loads(said.read_text())
    return words, environment


def test_the_trainer_is_one_step_over_its_own_nodes(tmp_path: Path, said: Path):
    # case G4-12: --cpus-per-task in words
    launcher = SrunLauncher(profile(mpi="pmix_v4"), GROUPS, tmp_path / "code")
    words, environment = start(launcher, spec(tmp_path, "trainer", group="trainer", num_tasks=8), said)
    assert words == [
        *("--input=none", "--het-group=0", "--job-name=trainer.1", "--nodes=2", "--nodelist=t1,t2", "--ntasks=8"),
        *("--ntasks-per-node=4", "--cpus-per-task=16", "--mpi=pmix_v4", "--overlap", "--gpu-bind=none"),
        *("--kill-on-bad-exit=1", "--unbuffered", sys.executable, "-P", "-u", "-m", "towline.jobs.slurm.task"),
        "towline.jobs.x_role",
    ]
    assert environment["TOWLINE_NUM_TASKS"] == "8"
    assert environment["TOWLINE_MPI"] == "pmix_v4"
    assert environment["TOWLINE_GPUS"] == "0:4"  # the node's; each rank takes its own by its local number
    assert environment["PYTHONPATH"].split(":")[0] == str(tmp_path / "code")


def test_an_engine_is_a_step_of_its_own_on_a_named_node_without_mpi(tmp_path: Path, said: Path):
    words, environment = start(
        SrunLauncher(profile(), GROUPS), spec(tmp_path, "rollout.3", group="rollout", number=3, arguments=("3",)), said
    )
    assert {"--het-group=1", "--nodes=1", "--nodelist=g2", "--ntasks=1", "--mpi=none"} <= set(words)
    assert words[-1] == "3"
    assert environment["TOWLINE_GPUS"] == "2:2"
    # The profile's own options come last, and take out what they say is false.
    assert "--mem=0" in words
    assert "--overlap" not in words


def test_no_variable_of_the_job_or_of_another_component_reaches_a_step(tmp_path: Path, said: Path):
    _, environment = start(SrunLauncher(profile(), GROUPS), spec(tmp_path, "rollout.0", group="rollout"), said)
    # cases G4-10, G4-11, G4-12
    kept = {name for name in environment if name.startswith("SLURM_")}
    assert kept == {"SLURM_JOB_ID", "SLURM_CONF"}
    assert not {"SRUN_CPUS_PER_TASK", "CUDA_VISIBLE_DEVICES", "PMIX_RANK", "RANK", "MASTER_PORT"} & environment.keys()
    assert environment["OMP_NUM_THREADS"] == "3"


def test_arguments_reach_srun_unchanged(tmp_path: Path, said: Path):
    # case G4-20
    arguments = ("a b", "it's", 'x"y', "$HOME", "r(1)", "50%x", "")
    wanted = spec(tmp_path, "rollout.0", group="rollout", arguments=arguments)
    words, _ = start(SrunLauncher(profile(), GROUPS), wanted, said)
    assert tuple(words[-len(arguments) :]) == arguments


def test_a_scorer_without_a_group_runs_beside_the_supervisor_without_the_trainers_gpus(tmp_path: Path, said: Path):
    words, environment = start(SrunLauncher(profile(), GROUPS), spec(tmp_path, "scorer.0", group="scorer"), said)
    assert {"--het-group=0", "--nodelist=t1", "--ntasks=1", "--mpi=none"} <= set(words)
    assert environment["TOWLINE_GPUS"] == "0:0"


def test_a_container_goes_between_srun_and_python(tmp_path: Path, said: Path):
    # case G4-24: HF_HOME is the profile's
    env = {"NCCL_IB_HCA": "mlx5_0", "HF_HOME": "/shared/hub"}
    software = {"image": "/my images/t.sif", "run": "apptainer exec --nv {image}", "env": env}
    launcher = SrunLauncher(profile(software=software), GROUPS)
    words, environment = start(launcher, spec(tmp_path, "rollout.0", group="rollout"), said)
    at = words.index("apptainer")
    assert words[at : at + 7] == ["apptainer", "exec", "--nv", "/my images/t.sif", "python3", "-P", "-u"]
    assert env.items() <= environment.items()
    command = launcher.store_command().command
    assert command[0] == "srun"
    assert command[-7:] == ("--nv", "/my images/t.sif", "python3", "-P", "-u", "-m", "towline.jobs.store_process")


def test_the_interface_of_the_profile_is_used_for_everything(tmp_path: Path, said: Path):
    launcher = SrunLauncher(profile(interface="lo"), GROUPS)
    _, environment = start(launcher, spec(tmp_path, "rollout.0", group="rollout"), said)
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "lo"
    assert launcher.store_command().host == "127.0.0.1"


def test_the_store_listens_on_this_host_wherever_rank_0_runs(said: Path):
    """Slurm may sort the node list, or give rank 0 to another node: nobody is asked where rank 0 is."""
    # case G4-04
    assert address_of(None) == socket.gethostbyname(socket.gethostname())
    with pytest.raises(InputError, match=r"interface ib7 of the profile has no IPv4 address .* which has .*lo"):
        address_of("ib7")


@pytest.mark.parametrize("host", ["t1", "t2"])
def test_the_store_is_started_on_the_host_whose_address_is_given_out(
    host: str, said: Path, monkeypatch: pytest.MonkeyPatch
):
    # case G4-04
    monkeypatch.setenv("SLURMD_NODENAME", host)
    options = SrunLauncher(profile(), GROUPS).store_command().command
    assert {f"--nodelist={host}", "--nodes=1", "--ntasks=1"} <= set(options)


def test_weights_go_over_nccl_where_every_process_has_gpus_of_its_own(said: Path):
    assert SrunLauncher(profile(), GROUPS).transfer_backend == "nccl"
    shared = {name: Place(nodes=("n",), per_node=1, gpus_per_process=1, options={}) for name in ("trainer", "rollout")}
    assert SrunLauncher(profile(), shared).transfer_backend == "gloo"
    none = {name: Place(nodes=(name,), per_node=1, options={}) for name in ("trainer", "rollout")}
    assert SrunLauncher(profile(), none).transfer_backend == "gloo"
    assert SrunLauncher(profile(), {"trainer": GROUPS["trainer"]}).transfer_backend == "gloo"


def test_srun_is_told_to_end_its_step_and_passes_signals_on(
    tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLEEPS", "600")
    process = SrunLauncher(profile(), GROUPS).start(spec(tmp_path, "rollout.0", group="rollout"))
    while not said.exists():
        time.sleep(0.01)
    process.end(0.0)
    assert process.poll() == -signal.SIGTERM


def end_of_a_killed_srun(tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLEEPS", "600")
    process = SrunLauncher(profile(), GROUPS).start(spec(tmp_path, "rollout.0", group="rollout"))
    while not said.exists():
        time.sleep(0.01)
    os.kill(process._popen.pid, signal.SIGKILL)
    process._popen.wait()
    process.end(0.0)


def test_steps_of_an_srun_that_was_killed_are_cancelled_by_name(
    tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch
):
    cancelled = tmp_path / "cancelled"
    squeue = f"#!/bin/sh\n[ -e {cancelled} ] || printf '12.0|trainer.0\\n12.3|rollout.0.1\\n'\n"
    for name, text in {"squeue": squeue, "scancel": f'#!/bin/sh\necho "$@" >> {cancelled}\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    end_of_a_killed_srun(tmp_path, said, monkeypatch)
    assert cancelled.read_text() == "--signal=KILL 12.3\n"


def test_a_controller_that_is_away_hides_no_fault_when_a_step_is_ended(
    tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "squeue").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    (tmp_path / "squeue").chmod(0o755)
    end_of_a_killed_srun(tmp_path, said, monkeypatch)
    assert "whether step rollout.0.1 has ended is not known" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "lost"), [("idle", False), ("allocated", False), ("mixed", False), ("down*", True), ("draining", False)]
)
def test_an_engines_node_is_lost_when_slurm_says_that_it_is_down(
    tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch, state: str, lost: bool
):
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\necho 'g1|{state}'\n")
    (tmp_path / "sinfo").chmod(0o755)
    launcher = SrunLauncher(profile(), GROUPS)
    assert (launcher.lost_node(spec(tmp_path, "rollout.1", group="rollout", number=1)) == "g1") is lost
    assert launcher.lost == (["g1"] if lost else [])


def test_a_scorer_moves_from_a_lost_node_to_one_that_is_left(
    tmp_path: Path, said: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each of the two nodes has one beside its engines; the lost one's goes to the other, until that is lost too."""
    down = tmp_path / "down"
    down.write_text("g1|idle\ng2|down*\n")
    (tmp_path / "sinfo").write_text(f"#!/bin/sh\ncat {down}\n")
    (tmp_path / "sinfo").chmod(0o755)
    scorer = Place(nodes=("g1", "g2"), per_node=1, het_group=1, options={})
    launcher = SrunLauncher(profile(), GROUPS | {"scorer": scorer})
    second = spec(tmp_path, "scorer.1", group="scorer", number=1, arguments=("1",))
    words, environment = start(launcher, second, said)
    assert {"--het-group=1", "--nodelist=g2", "--ntasks=1"} <= set(words)
    assert environment["TOWLINE_GPUS"] == "0:0"
    assert launcher.lost_node(second) is None
    assert launcher.lost == ["g2"]
    words, _ = start(launcher, second, said)
    assert {"--nodelist=g1", "1"} <= set(words)
    down.write_text("g1|down*\ng2|down*\n")
    assert launcher.lost_node(second) == "g1"


def test_a_controller_that_does_not_answer_has_not_lost_the_node(tmp_path: Path, said: Path):
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "sinfo").chmod(0o755)
    launcher = SrunLauncher(profile(), GROUPS)
    assert launcher.lost_node(spec(tmp_path, "rollout.1", group="rollout", number=1)) is None
    assert launcher.lost == []
