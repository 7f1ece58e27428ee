"""One rank that saves or loads every checkpoint of test_checkpoint.py.

    mpirun -n 2 python checkpoint_worker.py save|load FOLDER HOST:PORT

FOLDER holds the models. Checkpoints lie in FOLDER/checkpoints/NAME; what a rank found goes to FOLDER/found/PHASE/NAME,
one JSON file a rank and one .npz file of weights and moments of the whole world.
"""

import copy
import dataclasses
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor
from worker_rank import end_process, worker_rank

from towline.storage import checkpoints
from towline.storage.checkpoints import TrainingState
from towline.storage.errors import CheckpointError
from towline.trainer.checkpoint import load_checkpoint, save_checkpoint
from towline.trainer.config import TrainerConfig
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.policy import Policy, load_policy

STEP = 5
CASES = [(stage, precision) for precision in ("float32", "bfloat16") for stage in (0, 1, 2, 3)]
Arrays = dict[str, np.ndarray]


def case_name(stage: int, precision: str, ranks: int) -> str:
    return f"zero{stage}-{precision}-by{ranks}"


def state(stage: int, precision: str, ranks: int, **changes: Any) -> TrainingState:
    usual = TrainingState(
        step=STEP, wave=0, branch=1, version=STEP, stream_digest="ab12", seed=7, data="prompts-1", reference="sft-1",
        kl_beta=0.04, ranks=ranks, zero_stage=stage, precision=precision,
        optimizer={"adam_betas": [0.9, 0.95], "weight_decay": 0.1},
    )  # fmt: skip
    return dataclasses.replace(usual, **changes)


def to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy().copy()


class Trainer:
    """A fresh engine and a toy loss over two fixed batches, however many ranks share them."""

    def __init__(self, policy: Policy, stage: int, precision: Any) -> None:
        config = TrainerConfig(
            learning_rate=1e-3, weight_decay=0.1, zero_stage=stage, precision=precision, max_grad_norm=0.5
        )
        self.engine = DeepSpeedEngine(policy, config)
        self.precision = precision

    def train(self, step: int, *, is_noisy: bool) -> float:
        """One optimiser step; noise comes from torch's generator of this rank. Returns the loss of all ranks."""
        numbers = list(range(dist.get_rank(), 2, dist.get_world_size()))
        loss_sum = torch.zeros((), dtype=torch.float64)
        for number in numbers:
            batch = pack([TokenSequence(token_ids=np.arange(1, 40) * (step + 3 + number), num_prompt_tokens=2)])
            logprobs_N = self.engine.forward(batch)[0]
            weights_N = torch.rand(len(logprobs_N)) if is_noisy else torch.linspace(-0.3, 1, len(logprobs_N))
            loss = -(logprobs_N * weights_N).sum() / 80
            self.engine.backward(loss, is_last=number == numbers[-1])
            loss_sum += loss.detach()
        dist.all_reduce(loss_sum)
        self.engine.step(1e-3 / (step + 1))
        return loss_sum.item()

    def arrays(self) -> Arrays:
        """Weights and moments, whole. Every rank must call it."""
        found: Arrays = {}
        metas = self.engine.tensors()
        with self.engine.gathered(range(len(metas))) as tensors:
            found |= {f"weight/{meta.name}": to_numpy(tensor) for meta, tensor in zip(metas, tensors, strict=True)}
        if self.engine.zero_stage in (1, 2):
            # What the next step would do first: show the moments that the optimiser has, also right after a load.
            self.engine._engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, parameter in self.engine.policy.model.named_parameters():
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{kind}/{name}"] = to_numpy(self._moment(parameter, kind))
            if self.engine.zero_stage > 0:
                found[f"master/{name}"] = to_numpy(safe_get_full_fp32_param(parameter))  # pyright: ignore
        return found

    def _moment(self, parameter: Any, kind: str) -> Tensor:
        if self.engine.zero_stage > 0:
            moment = safe_get_full_optimizer_state(parameter, kind)
            assert moment is not None
            return moment
        return stage0_moment(self.engine, parameter, kind)

    def steps_taken(self) -> list[float]:
        states = self.engine._engine.optimizer.state.values()
        return sorted({float(entry["step"]) for entry in states if "step" in entry})

    def logprobs(self) -> np.ndarray:
        batch = pack([TokenSequence(token_ids=np.arange(1, 30), num_prompt_tokens=1)])
        with self.engine.policy.at_temperature(1.0):
            return to_numpy(self.engine.evaluate(batch))


def stage0_moment(engine: DeepSpeedEngine, parameter: Any, kind: str) -> Tensor:
    optimizer = engine._engine.optimizer
    if parameter in optimizer.state:
        return optimizer.state[parameter][kind]
    # bfloat16: the optimiser holds float32 copies
    (halves,), (masters,) = optimizer.fp16_groups, optimizer.fp32_groups
    (number,) = [number for number, half in enumerate(halves) if half is parameter]
    return optimizer.optimizer.state[masters[number]][kind]


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), *np.random.rand(2), np.random.randn(), *torch.rand(2).tolist()]


class Phase:
    def __init__(self, phase: str, folder: Path) -> None:
        self.folder, self.rank, self.ranks = folder, dist.get_rank(), dist.get_world_size()
        self.place = folder / "found" / f"{phase}-{self.ranks}"
        self.place.mkdir(parents=True, exist_ok=True)
        self._policies: dict[tuple[str, str], Policy] = {}

    def trainer(self, stage: int, precision: str, weights: str = "start") -> Trainer:
        model = f"{weights}-{'untied' if stage in (1, 3) else 'tied'}"
        key = (model, precision)
        if key not in self._policies:
            self._policies[key] = load_policy(self.folder / model, temperature=0.7, precision=precision)
        return Trainer(copy.deepcopy(self._policies[key]), stage, precision)

    def checkpoints(self, name: str) -> Path:
        return self.folder / "checkpoints" / name

    def keep(self, name: str, values: dict[str, Any], arrays: Arrays | None = None) -> None:
        (self.place / f"{name}.{self.rank}.json").write_text(json.dumps(values))
        if arrays is not None and self.rank == 0:
            np.savez(self.place / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]

    def save(self, trainer: Trainer, folder: Path, present: TrainingState, keep: int = 3) -> int:
        """Returns how often progress was told."""
        told: list[None] = []
        save_checkpoint(
            trainer.engine, folder, present, model_folder=self.folder / "start-tied", keep=keep,
            on_progress=lambda: told.append(None),
        )  # fmt: skip
        return len(told)

    def go_on(self, trainer: Trainer, *, is_noisy: bool) -> tuple[dict[str, Any], Arrays]:
        """What the trainer is now, and what two more steps make of it."""
        found = {f"0/{name}": array for name, array in trainer.arrays().items()}
        found["0/logprobs"] = trainer.logprobs()
        values: dict[str, Any] = {"steps_taken": trainer.steps_taken(), "losses": []}
        for step in (1, 2):
            values["losses"].append(trainer.train(STEP + step, is_noisy=is_noisy))
            found |= {f"{step}/{name}": array for name, array in trainer.arrays().items()}
        return values | {"draws": draws()}, found


def save_all(phase: Phase) -> None:
    for stage, precision in CASES:
        name = case_name(stage, precision, phase.ranks)
        random.seed(phase.rank), np.random.seed(phase.rank), torch.manual_seed(phase.rank)
        trainer = phase.trainer(stage, precision)
        trainer.train(0, is_noisy=False)
        trainer.train(1, is_noisy=False)
        random.gauss(0, 1), np.random.randn()  # both keep a second number for the next call
        phase.save(trainer, phase.checkpoints(name), state(stage, precision, phase.ranks))
        phase.keep(name, *phase.go_on(trainer, is_noisy=True))
        # Noise differs between numbers of ranks: go on without, for those that load with another number.
        again = phase.trainer(stage, precision)
        load_checkpoint(again.engine, phase.checkpoints(name), STEP, state(stage, precision, phase.ranks))
        phase.keep(f"{name}-quiet", *phase.go_on(again, is_noisy=False))
    if phase.ranks == 2:
        save_several(phase)


def save_several(phase: Phase) -> None:
    """Retention, a leftover of a dead writer, a step saved twice."""
    trainer, folder = phase.trainer(2, "float32"), phase.checkpoints("several")
    if phase.rank == 0:
        (folder / "step-000003").mkdir(parents=True)
        (folder / "step-000003" / "torn").touch()
    for step in (1, 2, 3):
        phase.save(trainer, folder, state(2, "float32", 2, step=step), keep=2)
    kept = checkpoints.complete_steps(folder)
    mark = folder / "step-000003" / "complete.json"
    found: dict[str, Any] = {"kept": kept, "torn": (folder / "step-000003" / "torn").exists()}
    written = mark.stat().st_mtime_ns
    phase.save(trainer, folder, state(2, "float32", 2, step=3), keep=2)
    found["rewritten_same"] = mark.stat().st_mtime_ns != written
    dist.barrier()
    found["told"] = phase.save(trainer, folder, state(2, "float32", 2, step=3, branch=9), keep=2)
    found["branch"] = checkpoints.read_state(folder, 3).branch
    phase.keep("several", found)


def load_all(phase: Phase) -> None:
    for ranks in (1, 2):
        for stage, precision in CASES:
            name = case_name(stage, precision, ranks)
            random.seed(99), np.random.seed(99), torch.manual_seed(99)
            trainer = phase.trainer(stage, precision, "other")
            saved = load_checkpoint(trainer.engine, phase.checkpoints(name), STEP, state(stage, precision, phase.ranks))
            values, arrays = phase.go_on(trainer, is_noisy=ranks == phase.ranks)
            phase.keep(name, values | {"state": dataclasses.asdict(saved)}, arrays)
            if ranks != phase.ranks:
                load_what_was_saved_after(phase, trainer, stage, precision, name)
    if phase.ranks == 2:
        refuse_all(phase)
        fill_the_disk(phase)


def load_what_was_saved_after(phase: Phase, trainer: Trainer, stage: int, precision: str, name: str) -> None:
    """After a change of ranks the next checkpoint is one as any other."""
    now = state(stage, precision, phase.ranks)
    phase.save(trainer, phase.checkpoints(f"{name}-again"), now)
    fresh = phase.trainer(stage, precision, "other")
    load_checkpoint(fresh.engine, phase.checkpoints(f"{name}-again"), STEP, now)
    before, after = trainer.arrays(), fresh.arrays()
    differing = [key for key in before if not np.array_equal(before[key], after[key])]
    losses = [other.train(STEP + 3, is_noisy=False) for other in (trainer, fresh)]
    phase.keep(f"{name}-again", {"differing": differing, "losses": losses})


def refuse_all(phase: Phase) -> None:
    trainer = phase.trainer(2, "float32", "other")
    trainer.train(0, is_noisy=False)
    before = trainer.arrays()
    name = case_name(2, "float32", 2)
    changes: dict[str, dict[str, Any]] = {
        "kl_beta": {"kl_beta": 0.0}, "seed": {"seed": 8}, "data": {"data": "prompts-2"},
        "reference": {"reference": "sft-2"}, "zero_stage": {"zero_stage": 3}, "precision": {"precision": "bfloat16"},
        "optimizer": {"optimizer": {"adam_betas": [0.9, 0.999], "weight_decay": 0.1}},
        "several": {"seed": 8, "kl_beta": 0.0},
    }  # fmt: skip
    messages = {
        f"changed-{part}": refusal(
            trainer, phase.checkpoints(name), dataclasses.replace(state(2, "float32", 2), **change)
        )
        for part, change in changes.items()
    }
    for damage in ("truncated", "flipped", "missing-rng", "missing-hf", "unmarked"):
        folder = phase.checkpoints(damage)
        if phase.rank == 0:
            shutil.copytree(phase.checkpoints(name), folder)
            spoil(folder / f"step-{STEP:06d}", damage)
        dist.barrier()
        messages[damage] = refusal(trainer, folder, state(2, "float32", 2))
    after = trainer.arrays()
    touched = [key for key in before if not np.array_equal(before[key], after[key])]
    phase.keep("refusals", {"messages": messages, "touched": touched})


def spoil(path: Path, damage: str) -> None:
    optimiser = path / "engine" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    if damage == "truncated":
        os.truncate(optimiser, optimiser.stat().st_size - 1)
    elif damage == "flipped":
        content = bytearray(optimiser.read_bytes())
        content[len(content) // 2] ^= 1
        optimiser.write_bytes(content)
    elif damage == "missing-rng":
        (path / "rng" / "rank-1.json").unlink()
    elif damage == "missing-hf":
        (path / "hf" / "model.safetensors").unlink()
    else:
        (path / "complete.json").unlink()


def refusal(trainer: Trainer, folder: Path, present: TrainingState) -> str | None:
    try:
        load_checkpoint(trainer.engine, folder, STEP, present)
    except CheckpointError as error:
        return str(error)
    return None


def fill_the_disk(phase: Phase) -> None:
    """FOLDER/small, where it exists, is a file system with room for one checkpoint and a half."""
    small = phase.folder / "small"
    if not small.is_dir():
        return
    for stage in (0, 2, 3):
        trainer, folder = phase.trainer(stage, "float32"), small / f"zero{stage}"
        trainer.train(0, is_noisy=False)
        phase.save(trainer, folder, state(stage, "float32", 2, step=1))
        message = None
        try:
            phase.save(trainer, folder, state(stage, "float32", 2, step=2))
        except CheckpointError as error:
            message = str(error)
        dist.barrier()
        found = {
            "message": message,
            "complete": checkpoints.complete_steps(folder),
            "folders": sorted(path.name for path in folder.iterdir()),
            "problems": checkpoints.verify_files(folder, 1),
            "loss": trainer.train(3, is_noisy=False),
        }
        phase.keep(f"full-zero{stage}", found)
        dist.barrier()
        if phase.rank == 0:
            shutil.rmtree(folder)
        dist.barrier()


def main() -> None:
    phase, folder, address = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    with worker_rank(address, phase):
        {"save": save_all, "load": load_all}[phase](Phase(phase, folder))


if __name__ == "__main__":
    main()
    end_process()
