"""Which processes a run has, and what each is told. Imports no torch."""

import dataclasses
from dataclasses import dataclass

from towline.jobs.experiment import ExperimentConfig, RolloutExperiment
from towline.jobs.launch import GroupName, ProcessSpec
from towline.storage.run_directory import RunDirectory

TRAINER = "trainer"
_OF_TRAINER = {
    # oneDNN keeps what it made for each shape of a product, of 1,024. Packed steps hardly repeat a shape: in bfloat16
    # on CPU that grew by gigabytes. A micro-batch has some twenty shapes, in each of its layers: these stay.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of a run."""

    run: RunDirectory
    number: int
    experiment: ExperimentConfig
    resume_step: int | None = None
    """The checkpoint to go on from."""
    replay_step: int | None = None
    """Train again up to this step from the ledger, without engines, instead."""

    @property
    def heartbeats(self) -> list[str]:
        """Processes that tell how they are, one for each rank of the trainer."""
        ranks = [f"{TRAINER}.{rank}" for rank in range(self.experiment.local.trainer_ranks)]
        return ranks if self.replay_step is not None else [*ranks, *self._engines, *self._scorers]

    @property
    def _engines(self) -> list[str]:
        return [f"rollout.{number}" for number in range(self.experiment.num_engines)]

    @property
    def _scorers(self) -> list[str]:
        return [f"scorer.{number}" for number in range(self.experiment.num_scorers)]

    def processes(self, store_address: str, transfer_backend: str) -> list[ProcessSpec]:
        """The trainer's ranks are one MPI world; engines and scorers are processes of their own."""
        local = self.experiment.local
        common = {
            "TOWLINE_RUN": str(self.run.root.resolve()),
            "TOWLINE_ATTEMPT": str(self.number),
            "TOWLINE_STORE": store_address,
            "TOWLINE_TRANSFER_BACKEND": transfer_backend,
            # Idle threads that spin take the core from the process that works.
            "OMP_WAIT_POLICY": "passive",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # Or torch writes two lines for each half second that somebody waits for a key of the store.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            # DeepSpeed compiles an optimiser that is not used when it is imported: 3 s of a core.
            "TORCHDYNAMO_DISABLE": "1",
        }
        steps = {"TOWLINE_REPLAY_STEP": self.replay_step, "TOWLINE_RESUME_STEP": self.resume_step}
        common |= {name: str(step) for name, step in steps.items() if step is not None}

        def spec(name: str, group: GroupName, number: int = 0, *, threads: int = 1) -> ProcessSpec:
            return ProcessSpec(
                name=name,
                module=f"towline.jobs.{group}_role",
                group=group,
                number=number,
                arguments=() if group == "trainer" else (str(number),),
                environment=common | {"OMP_NUM_THREADS": str(threads)} | (_OF_TRAINER if group == "trainer" else {}),
                log=self.run.log(self.number, f"{name}.launch"),
            )

        ranks = spec(TRAINER, "trainer", threads=local.trainer_threads)
        trainer = dataclasses.replace(ranks, num_tasks=local.trainer_ranks)
        if self.replay_step is not None or not isinstance(self.experiment, RolloutExperiment):
            return [trainer]
        threads = self.experiment.local.engine_threads
        engines = [spec(name, "rollout", n, threads=threads) for n, name in enumerate(self._engines)]
        return [trainer, *engines, *(spec(name, "scorer", number) for number, name in enumerate(self._scorers))]
