"""One rank that trains, refreshes and resumes for test_reference.py.

    mpirun -n 2 python reference_worker.py save|load FOLDER HOST:PORT

FOLDER holds the models and the pickled groups of each step. Checkpoints lie in FOLDER/checkpoints/CASE; what a phase
found goes to FOLDER/PHASE-RANKS, for each case one JSON file and one .npz file.
"""

import importlib.util
import json
import pickle
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed_worker import RecordingEngine, to_numpy
from worker_rank import end_process, worker_rank

from towline.jobs import rollout_trainer
from towline.jobs.load_experiment import load_experiment
from towline.storage.checkpoints import TrainingState
from towline.storage.errors import CheckpointError
from towline.trainer import grpo
from towline.trainer.checkpoint import load_checkpoint, save_checkpoint
from towline.trainer.config import TrainerConfig
from towline.trainer.dynamic_sampling import StepBatch
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.policy import load_policy
from towline.trainer.reference import Reference
from towline.trainer.rollout_steps import Metrics, train

EXPERIMENT = Path(__file__).parents[2] / "jobs" / "experiments" / "tiny-grpo.toml"
STEPS, EVERY, TEMPERATURE = 6, 2, 0.7
SAVED = (2, 3)
"""Versions with a checkpoint: of a refresh, and of the step after it."""
CASES = [(stage, "float32", home) for stage in (0, 1, 2, 3) for home in ("on_device", "offloaded")]
CASES += [(2, "bfloat16", "offloaded"), (3, "bfloat16", "offloaded")]
if importlib.util.find_spec("torchao"):
    # First: once ZeRO-3 was in use, linear layers of the whole process transpose their weights.
    CASES = [(2, "float32", "int8"), (2, "bfloat16", "int8"), *CASES]
BATCH = pack([TokenSequence(token_ids=np.arange(1, 30), num_prompt_tokens=1)])
Arrays = dict[str, np.ndarray]


class Run:
    """A run of six steps, from the beginning or from a checkpoint."""

    def __init__(self, folder: Path, case: tuple[int, str, str], **settings: Any) -> None:
        stage, precision, home = case
        self.name = f"zero{stage}-{precision}-{home}"
        usual: dict[str, Any] = {"learning_rate": 1e-3, "kl_beta": 0.1, "reference_every": EVERY}
        self.config = TrainerConfig(**(usual | settings), zero_stage=stage, precision=precision)  # pyright: ignore
        self.model, self.checkpoints = folder / "start", folder / "checkpoints" / self.name
        self.groups = pickle.loads((folder / "groups.pkl").read_bytes())
        self.engine = RecordingEngine(
            load_policy(self.model, temperature=TEMPERATURE, precision=precision), self.config
        )
        self.reference = self._reference(home) if self.config.kl_beta > 0 else None
        self.values: dict[str, Any] = {}
        self.arrays: Arrays = {}

    def _reference(self, home: Any) -> Reference:
        return Reference(
            self.model, self.config, temperature=TEMPERATURE, home=home, refreshed=self.checkpoints / f"by{_ranks()}"
        )

    def state(self, step: int) -> TrainingState:
        return TrainingState(
            step=step, wave=0, branch=0, version=step, stream_digest="", seed=1, data="", kl_beta=0.1, ranks=_ranks(),
            zero_stage=self.config.zero_stage, precision=self.config.precision, optimizer={},
            reference=f"start@{self.config.last_refresh(step)}",
        )  # fmt: skip

    def read(self, step: int) -> StepBatch:
        return StepBatch(drawn=self.groups[step], trained=self.groups[step])

    def resume(self, step: int) -> None:
        load_checkpoint(self.engine, self.checkpoints, step, self.state(step), reference=self.reference)

    def note_reference(self, step: int) -> None:
        if self.reference is not None:
            self.arrays[f"{step}/reference"] = to_numpy(self.reference.logprobs([BATCH])[0])

    def finish_step(self, step: int, metrics: Metrics) -> None:
        version = step + 1
        self.values[f"{version}"] = {name: value for name, value in metrics.items() if name.startswith("loss/")}
        self.arrays[f"{version}/policy"] = to_numpy(self.engine.evaluate(BATCH))
        self.arrays |= {f"{version}/{name}": array for name, array in self.engine.weights().items()}
        self.note_reference(version)

    def train(self, first: int, *, saved: tuple[int, ...] = ()) -> None:
        def finish_step(step: int, metrics: Metrics) -> None:
            self.finish_step(step, metrics)
            if step + 1 in saved:
                save_checkpoint(
                    self.engine, self.checkpoints, self.state(step + 1), model_folder=self.model, keep=3,
                    on_progress=lambda: None, reference=self.reference,
                )  # fmt: skip

        self.arrays[f"{first}/policy"] = to_numpy(self.engine.evaluate(BATCH))
        self.note_reference(first)
        inner_steps = partial(
            grpo.take_inner_steps, self.engine, self.reference, self.config, seed=1, max_completion_tokens=20,
            on_progress=lambda phase: None,
        )  # fmt: skip
        train(
            self.engine, self.reference, inner_steps, steps=range(first, STEPS), rollouts=self,
            publish=lambda version: {}, finish_step=finish_step, on_progress=lambda phase: None,
        )  # fmt: skip
        if dist.get_rank() == 0:
            self.values["folders"] = sorted(path.name for path in self.checkpoints.rglob("*reference*"))
        if self.reference is not None:
            self.reference.discard()

    def keep(self, place: Path, name: str) -> None:
        if dist.get_rank() == 0:
            place.mkdir(exist_ok=True)
            (place / f"{name}.json").write_text(json.dumps(self.values))
            np.savez(place / f"{name}.npz", **self.arrays)  # pyright: ignore[reportArgumentType]


def _ranks() -> int:
    return dist.get_world_size()


def save_all(folder: Path, place: Path) -> None:
    for case in CASES:
        run = Run(folder, case)
        run.train(0, saved=SAVED)
        run.keep(place, run.name)
    unpenalised = Run(folder, (2, "float32", "none"), kl_beta=0.0)
    unpenalised.train(0, saved=(2,))
    unpenalised.values["refused"] = what_is_loaded(folder)
    unpenalised.values["error"] = refresh_without_room(folder)
    unpenalised.keep(place, "unpenalised")


def load_all(folder: Path, place: Path) -> None:
    for case in CASES:
        for step in SAVED:
            torch.manual_seed(99)
            run = Run(folder, case)
            run.resume(step)
            if _ranks() == 2:
                run.train(step)
            else:
                run.note_reference(step)
                assert run.reference is not None
                run.reference.discard()
            run.keep(place, f"{run.name}-from{step}")


def what_is_loaded(folder: Path) -> dict[str, bool]:
    """Whether the trainer's role asks for a reference, by kl_beta."""
    found: dict[str, bool] = {}

    def ask(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("asked")

    usual, rollout_trainer.Reference = rollout_trainer.Reference, ask  # pyright: ignore
    for beta in (0.0, 0.1):
        experiment = load_experiment(
            EXPERIMENT,
            (
                f"policy.model={folder / 'start'}", "policy.reference=offloaded", "trainer.reference_every=2",
                f"trainer.kl_beta={beta}",
            ),
        )  # fmt: skip
        role: Any = SimpleNamespace(circle=experiment, heartbeat=SimpleNamespace(beat=lambda phase: None))
        try:
            assert rollout_trainer._load(role, folder)[1] is None
            found[str(beta)] = False
        except RuntimeError:
            found[str(beta)] = True
    rollout_trainer.Reference = usual
    return found


def refresh_without_room(folder: Path) -> list[str]:
    """What each rank hears when the folder for refreshed references cannot be made."""
    run = Run(folder, (2, "float32", "on_device"))
    assert run.reference is not None
    if dist.get_rank() == 0:
        (folder / "file").touch()
    run.reference._refreshed = folder / "file" / "folder"
    before, message = run.reference.logprobs([BATCH])[0], ""
    try:
        run.reference.refresh(run.engine, 2)
    except CheckpointError as error:
        message = str(error)
    assert torch.equal(run.reference.logprobs([BATCH])[0], before)
    messages = [""] * _ranks()
    dist.all_gather_object(messages, message)
    return messages


def main() -> None:
    phase, folder, address = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    with worker_rank(address, phase):
        {"save": save_all, "load": load_all}[phase](folder, folder / f"{phase}-{_ranks()}")


if __name__ == "__main__":
    main()
    end_process()
