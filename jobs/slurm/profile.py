"""A cluster profile: what a cluster has that an experiment should not have to know. Options carry Slurm's names."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from towline.storage.config import StrictModel

Option = str | int | bool
Options = dict[str, Option]
"""Long options of sbatch or srun, without dashes. `true` is a bare flag, `false` takes out one that Towline adds."""

_NOT_PER_NODE = ("gpus", "G", "gpus-per-task", "gpus-per-socket")
_COUNTED_BY_THE_EXPERIMENT = ("nodes", "N", "ntasks", "n", "array", "a", "het-group", "output", "error")


class Folders(StrictModel):
    runs: str = "runs"
    """Where runs are made, on the parallel file system; `$VAR` of the login node's environment is expanded."""
    node_local: str = "$TMPDIR"
    """Caches and sockets, on each node's own disk, one folder a job; `$VAR` is expanded on the node."""
    stage_model: bool = False
    """Copy the model to `node_local` once a node, and load it from there."""


class Software(StrictModel):
    modules: tuple[str, ...] = ()
    """Environment modules that the batch script loads, in order."""
    setup: tuple[str, ...] = ()
    """Further lines of the batch script before Towline starts."""
    python: str | None = None
    """Python of the roles on the compute nodes; default: the one that submits, or `python3` inside an image."""
    image: str | None = None
    """Container image, for `run`."""
    run: str = ""
    """Command before Python on srun, such as `apptainer exec --nv {image}`; the supervisor stays outside."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of the roles, such as NCCL_IB_HCA."""

    @model_validator(mode="after")
    def _image_is_used(self) -> "Software":
        if "{image}" in self.run and self.image is None:
            raise ValueError("software.run names {image}, and software.image is not set")
        return self


class Group(StrictModel):
    sbatch: Options = Field(default_factory=dict)
    srun: Options = Field(default_factory=dict)

    @field_validator("sbatch", "srun")
    @classmethod
    def _not_ours(cls, options: Options) -> Options:
        for name in options:
            if name.startswith("-"):
                raise ValueError(f'options are written without dashes: "{name.lstrip("-")}"')
            if name in _COUNTED_BY_THE_EXPERIMENT:
                raise ValueError(f"{name} follows from the experiment's [nodes] and the run's folder; leave it out")
            if name in _NOT_PER_NODE:
                raise ValueError(f"{name} does not say how many GPUs a node has; write gpus-per-node, or gres")
        return options

    @property
    def gpus_per_node(self) -> int:
        for name in ("gpus-per-node", "gres"):
            if name in self.sbatch and (count := _gpus(str(self.sbatch[name]), plain=name == "gpus-per-node")):
                return count
        return 0

    @property
    def processes_per_node(self) -> int:
        """Trainer ranks, engines or scorers of one node: `ntasks-per-node`, else one a GPU, else one."""
        return int(self.sbatch.get("ntasks-per-node", 0)) or self.gpus_per_node or 1

    @property
    def cpus_per_process(self) -> int | None:
        return int(self.sbatch["cpus-per-task"]) if "cpus-per-task" in self.sbatch else None


def _gpus(text: str, *, plain: bool) -> int:
    """GPUs of `4`, `h100:4`, `gpu:4`, `gpu:h100:4(S:0-1)`; several kinds, comma between, add up."""
    parts = [part.partition("(")[0].split(":") for part in text.split(",")]
    return sum(int(part[-1]) if part[-1].isdecimal() else 1 for part in parts if plain or part[0] == "gpu")


class ClusterProfile(StrictModel):
    model_config = ConfigDict(populate_by_name=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    layout: Literal["het", "single", "auto"] = "het"
    """`het`: one heterogeneous job. `single`: one job whose nodes the supervisor splits. `auto`: het, unless both
    groups ask for the same options."""
    continue_: Annotated[Literal["requeue", "resubmit", "off"], Field(alias="continue")] = "requeue"
    """After a time limit or a preemption: the same job again, a successor that waits for its end, or nothing."""
    on_node_loss: Literal["requeue", "continue"] = "requeue"
    """When a rollout node is lost: start again with all nodes, or go on with the engines that are left."""
    mpi: Annotated[str, Field(pattern=r"^[A-Za-z0-9_]+$")] = "pmix"
    """How ranks find one another, one of `srun --mpi=list`; with "none" Slurm's own variables say it."""
    interface: str | None = None
    """Network interface of the control store, gloo and NCCL's bootstrap; default: what the host's name resolves to."""
    vars: dict[str, str] = Field(default_factory=dict)
    """`${NAME}` in paths of experiments."""
    folders: Folders = Folders()
    software: Software = Software()
    trainer: Group = Group()
    rollout: Group = Group()
    scorer: Group = Group()
    smoke: Group = Group()
    """`towline submit --smoke`: both roles on one node of a debug partition."""

    @property
    def is_single(self) -> bool:
        return self.layout == "single" or (self.layout == "auto" and self.trainer.sbatch == self.rollout.sbatch)

    @model_validator(mode="after")
    def _single_has_one_kind_of_node(self) -> "ClusterProfile":
        if self.layout == "single" and self.trainer.sbatch != self.rollout.sbatch:
            odd = sorted(
                name
                for name in self.trainer.sbatch.keys() | self.rollout.sbatch.keys()
                if self.trainer.sbatch.get(name) != self.rollout.sbatch.get(name)
            )
            raise ValueError(
                f'layout = "single" is one job with one kind of node, and trainer.sbatch and rollout.sbatch differ in '
                f'{", ".join(odd)}. Make them equal, or use layout = "het"'
            )
        return self

    def dump(self) -> dict[str, Any]:
        """As `model_validate_json` reads it."""
        return self.model_dump(mode="json", by_alias=True)
