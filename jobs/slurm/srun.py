"""Start the processes of a run as steps of a Slurm allocation: a step for the trainer's ranks, one for each other.

srun takes its defaults from the environment of the batch step, which describes the leader's component alone. So it is
given only what says which job this is, and every option in words.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from towline.jobs.launch import STORE_MODULE, ProcessSpec, StoreCommand, own_environment
from towline.jobs.slurm.allocation import lost_nodes
from towline.jobs.slurm.command import slurm
from towline.jobs.slurm.placement import Place
from towline.jobs.slurm.profile import ClusterProfile, Options
from towline.jobs.slurm.task import CLEAR
from towline.storage.errors import InputError, SlurmError

TASK_MODULE = "towline.jobs.slurm.task"
_JOB_VARIABLES = ("SLURM_CONF", "SLURM_JOB_ID")
"""All that srun must know of the allocation; it asks the controller for the rest."""
_KILL_WAIT_S = 10.0
_CLEAR_WITHIN_S = 60.0


class SrunLauncher:
    """
    Args:
        groups: where the processes of each kind run.
        code: folder that is first on the import path of every process: what was there when the run was submitted.
    """

    def __init__(self, profile: ClusterProfile, groups: Mapping[str, Place], code: Path | None = None) -> None:
        self._profile = profile
        self._groups = groups
        self._code = code
        self.lost: list[str] = []
        """Nodes that went down while the job ran."""
        self._job = os.environ["SLURM_JOB_ID"]
        # This host; Slurm's lists are sorted, and the batch step need not be on their first node.
        here = os.environ.get("SLURMD_NODENAME", groups["trainer"].nodes[0])
        self._leader = Place(nodes=(here,), per_node=1, het_group=groups["trainer"].het_group,
                             options=groups["trainer"].options)  # fmt: skip

    @property
    def transfer_backend(self) -> str:
        trainer, rollout = self._groups["trainer"], self._groups.get("rollout")
        if rollout is None:  # nobody to send weights to
            return "gloo"
        is_shared = trainer.nodes == rollout.nodes and trainer.first_gpu == rollout.first_gpu
        return "nccl" if trainer.gpus_per_process and rollout.gpus_per_process and not is_shared else "gloo"

    def store_command(self) -> StoreCommand:
        """On the batch host, where the supervisor is: they live and die together."""
        options = srun_options("store", self._leader, self._leader.nodes, tasks_per_node=1, mpi="none")
        command = ("srun", *options, *self._python(), "-m", STORE_MODULE)
        return StoreCommand(command=command, host=address_of(self._profile.interface), environment=self._environment())

    def start(self, spec: ProcessSpec) -> "SrunProcess":
        place = self._groups.get(spec.group, self._leader)
        if spec.num_tasks is None:
            nodes, tasks_per_node, mpi = (self._node_of(spec, place),), 1, "none"
        else:
            nodes, tasks_per_node, mpi = place.nodes, place.per_node, self._profile.mpi
        step = f"{spec.name}.{spec.environment.get('TOWLINE_LIFE', '0')}"
        options = srun_options(step, place, nodes, tasks_per_node=tasks_per_node, mpi=mpi)
        command = ["srun", "--input=none", *options, *self._python(), "-m", TASK_MODULE, spec.module, *spec.arguments]
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        with spec.log.open("ab") as log:
            popen = subprocess.Popen(
                command,
                env=self._environment() | dict(spec.environment) | self._task_variables(spec, place, mpi),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return SrunProcess(spec, popen, self._job, step)

    def lost_node(self, spec: ProcessSpec) -> str | None:
        if spec.group not in self._groups or spec.num_tasks is not None:
            return None
        place = self._groups[spec.group]
        node = self._node_of(spec, place)
        # A controller that does not answer has not said that the node is lost: the process is started again.
        with contextlib.suppress(SlurmError):
            if node not in self.lost and lost_nodes([node]):
                self.lost.append(node)
        if spec.group == "scorer" and not set(place.nodes) <= set(self.lost):
            return None  # it starts again on a node that is left
        return node if node in self.lost else None

    def _node_of(self, spec: ProcessSpec, place: Place) -> str:
        """An engine stays where its model and GPUs are; a scorer needs nothing of its node, and moves."""
        node = place.node_of(spec.number)
        left = [one for one in place.nodes if one not in self.lost]
        return left[spec.number % len(left)] if spec.group == "scorer" and node in self.lost and left else node

    def clear_nodes(self) -> None:
        """Remove the job's copies of the model from the disks of the nodes that are left."""
        if not self._profile.folders.stage_model:
            return
        cleared = set(self.lost)
        for name, place in self._groups.items():
            left = tuple(node for node in place.nodes if node not in cleared)
            if not left:
                continue
            cleared |= {*left}
            options = srun_options(f"clear.{name}", place, left, tasks_per_node=1, mpi="none")
            command = ["srun", "--input=none", *options, *self._python(), "-m", TASK_MODULE, CLEAR]
            variables = {"TOWLINE_JOB": self._job, "TOWLINE_NODE_LOCAL": self._profile.folders.node_local}
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run(command, env=self._environment() | variables, timeout=_CLEAR_WITHIN_S, check=False)

    def _python(self) -> tuple[str, ...]:
        software = self._profile.software
        prefix = [word.replace("{image}", software.image or "") for word in shlex.split(software.run)]
        default = "python3" if software.image else sys.executable
        return (*prefix, software.python or default, "-P", "-u")

    def _environment(self) -> dict[str, str]:
        environment = own_environment()
        for name, value in os.environ.items():
            if name in _JOB_VARIABLES:
                environment[name] = value
        for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"):
            environment.pop(name, None)
        if self._code is not None:
            environment["PYTHONPATH"] = os.pathsep.join(
                [str(self._code), *filter(None, [os.environ.get("PYTHONPATH")])]
            )
        if self._profile.interface is not None:
            environment |= {
                "GLOO_SOCKET_IFNAME": self._profile.interface,
                "NCCL_SOCKET_IFNAME": self._profile.interface,
            }
        return environment | self._profile.software.env

    def _task_variables(self, spec: ProcessSpec, place: Place, mpi: str) -> dict[str, str]:
        variables = {
            "TOWLINE_JOB": self._job,
            "TOWLINE_MPI": mpi,
            "TOWLINE_NODE_LOCAL": self._profile.folders.node_local,
            "TOWLINE_STAGE_MODEL": "1" if self._profile.folders.stage_model else "",
        }
        if spec.num_tasks is not None:
            variables["TOWLINE_NUM_TASKS"] = str(spec.num_tasks)
            if place.gpus_per_process:
                variables["TOWLINE_GPUS"] = f"{place.first_gpu}:{place.per_node * place.gpus_per_process}"
        elif spec.group == "scorer":
            variables["TOWLINE_GPUS"] = "0:0"  # what GPUs its node has are the trainer's or an engine's
        elif (gpus := place.gpus_of(spec.number)) is not None:
            variables["TOWLINE_GPUS"] = f"{gpus[0]}:{gpus[1]}"
        return variables


def srun_options(step: str, place: Place, nodes: tuple[str, ...], *, tasks_per_node: int, mpi: str) -> list[str]:
    """Every option that the environment of the batch step would otherwise say."""
    options: Options = {
        "het-group": False if place.het_group is None else str(place.het_group),
        "job-name": step,
        "nodes": len(nodes),
        "nodelist": ",".join(nodes),
        "ntasks": len(nodes) * tasks_per_node,
        "ntasks-per-node": tasks_per_node,
        # Not inherited from the job by every version of Slurm.
        "cpus-per-task": False if place.cpus_per_process is None else place.cpus_per_process,
        "mpi": mpi,
        # Steps of one node share it: engines, the store, the scorer.
        "overlap": True,
        "gpu-bind": "none",
        "kill-on-bad-exit": 1,
        "unbuffered": True,
    }
    return list(_written(options | place.options))


def _written(options: Options) -> Iterator[str]:
    for name, value in options.items():
        if value is True:
            yield f"--{name}"
        elif value is not False:
            yield f"--{name}={value}"


def address_of(interface: str | None) -> str:
    """This host's own IPv4 address on the interface, or what its name resolves to.

    Raises:
        InputError: the host has no such interface, or it has no address.
    """
    if interface is None:
        return socket.gethostbyname(socket.gethostname())
    known = psutil.net_if_addrs()
    for address in known.get(interface, ()):
        if address.family == socket.AF_INET:
            return address.address
    raise InputError(
        f"interface {interface} of the profile has no IPv4 address on {socket.gethostname()}, which has "
        f"{', '.join(sorted(known))}. Set interface to one that every node has, or leave it out."
    )


@dataclass(slots=True)
class SrunProcess:
    """A step, and the srun that waits for it."""

    spec: ProcessSpec
    _popen: "subprocess.Popen[bytes]"
    _job: str
    _step: str

    def poll(self) -> int | None:
        return self._popen.poll()

    def signal(self, number: int) -> None:
        """To every task: srun passes it on."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._popen.pid, number)

    def end(self, grace_s: float) -> None:
        """srun answers SIGTERM by killing the step's tasks, so an orderly end must have been agreed on before."""
        if self._popen.poll() is None:
            self._popen.send_signal(signal.SIGTERM)
            try:
                self._popen.wait(timeout=grace_s + 5)
            except subprocess.TimeoutExpired:
                self._popen.kill()
                self._popen.wait(timeout=10)
        # An srun that was killed leaves its tasks behind.
        if self._popen.returncode == -signal.SIGKILL:
            self._cancel_step()

    def _cancel_step(self) -> None:
        """A controller that is away ends its job's steps when the job ends; what the caller is about to say of the run
        matters more than these."""
        deadline = time.monotonic() + _KILL_WAIT_S
        try:
            while (steps := self._ids()) and time.monotonic() < deadline:
                for step in steps:
                    with contextlib.suppress(SlurmError):  # it may have ended meanwhile
                        slurm(["scancel", "--signal=KILL", step])
                time.sleep(0.2)
        except SlurmError as error:
            print(f"! whether step {self._step} has ended is not known: {error}", flush=True)

    def _ids(self) -> list[str]:
        lines = slurm(["squeue", "--noheader", "--steps", f"--job={self._job}", "--format=%i|%j"]).splitlines()
        return [line.partition("|")[0] for line in lines if line.partition("|")[2] == self._step]
