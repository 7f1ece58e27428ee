"""One rank of a small trainer of adapters, for test_lora.py.

    mpirun -n 2 python lora_worker.py save|load FOLDER HOST:PORT

FOLDER holds the models, and the pickled sequences with what their tokens weigh in the loss. Checkpoints lie in
FOLDER/checkpoints/CASE-byRANKS; what a phase found goes to FOLDER/PHASE-RANKS, for each case one JSON file and one
.npz file.
"""

import copy
import json
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from deepspeed_worker import to_numpy
from worker_rank import end_process, worker_rank

from towline.storage.checkpoints import TrainingState
from towline.trainer.checkpoint import load_checkpoint, save_checkpoint
from towline.trainer.config import LoraConfig, TrainerConfig
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.lora import adapter_parameters
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.policy import Policy, load_policy
from towline.trainer.reference import Reference
from towline.trainer.weight_publisher import weights_digest

BETA, TEMPERATURE, STEP = 0.1, 0.7, 5
LORA = LoraConfig(rank=4, alpha=8)
HEAD = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "lm_head"))
BATCH = pack([TokenSequence(token_ids=np.arange(1, 30), num_prompt_tokens=1)])
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    stage: Literal[0, 1, 2, 3]
    precision: Literal["float32", "bfloat16"] = "float32"
    model: str = "tied"
    lora: LoraConfig | None = LORA
    gradient_checkpointing: bool = False
    sequences_per_batch: int = 6
    is_saved: bool = False

    @property
    def config(self) -> TrainerConfig:
        return TrainerConfig(
            learning_rate=1e-3, weight_decay=0.1, kl_beta=BETA, max_grad_norm=0.5, lora=self.lora,
            zero_stage=self.stage, precision=self.precision, gradient_checkpointing=self.gradient_checkpointing,
        )  # fmt: skip


CASES = [
    *(Case(name=f"zero{stage}", stage=stage, is_saved=True) for stage in (0, 1, 2, 3)),
    *(Case(name=f"bfloat16-zero{stage}", stage=stage, precision="bfloat16", is_saved=True) for stage in (2, 3)),
    *(Case(name=f"micro-zero{stage}", stage=stage, sequences_per_batch=1) for stage in (2, 3)),
    Case(name="checkpointing-zero3", stage=3, gradient_checkpointing=True),
    Case(name="head-zero3", stage=3, model="untied", lora=HEAD, is_saved=True),
]


class Trainer:
    """A fresh engine whose adapters are all in use, and a loss over six sequences, however many ranks share them."""

    def __init__(self, folder: Path, case: Case, policies: dict[Any, Policy], *, seed: int = 1, is_fresh: bool = False):
        key = (case.model, case.precision, case.lora, case.gradient_checkpointing)
        if key not in policies:
            # Any seed of torch: `fill` draws anew.
            policies[key] = load_policy(
                folder / case.model, temperature=TEMPERATURE, precision=case.precision, lora=case.lora,
                gradient_checkpointing=case.gradient_checkpointing,
            )  # fmt: skip
        policy, self.case, self.folder = copy.deepcopy(policies[key]), case, folder
        if not is_fresh:
            fill(policy, seed)
        self.engine = DeepSpeedEngine(policy, case.config)
        self.reference = Reference(folder / case.model, case.config, temperature=TEMPERATURE, adapted=self.engine)

    def step(self) -> tuple[float, float, Arrays]:
        """Loss of all ranks, gradient norm, and the gradient of each adapter."""
        examples, per_batch = pickle.loads((self.folder / "examples.pkl").read_bytes()), self.case.sequences_per_batch
        own = list(range(dist.get_rank(), len(examples), dist.get_world_size()))
        batches = [own[start : start + per_batch] for start in range(0, len(own), per_batch)]
        total = torch.zeros((), dtype=torch.float64)
        for numbers in batches:
            batch = pack([examples[number][0] for number in numbers])
            (reference_N,) = self.reference.logprobs([batch])
            logprobs_N = self.engine.forward(batch)[0]
            weights_N = torch.from_numpy(np.concatenate([examples[number][1] for number in numbers]))
            ratio_N = reference_N - logprobs_N
            loss = -(weights_N * logprobs_N).sum() + BETA / 50 * (ratio_N.exp() - ratio_N - 1).sum()
            self.engine.backward(loss, is_last=numbers is batches[-1])
            total += loss.detach()
        dist.all_reduce(total)
        gradients: Arrays = {}
        for name, parameter in adapter_parameters(self.engine.policy.model).items():
            gradient = safe_get_full_grad(parameter)
            assert gradient is not None, name
            gradients[f"gradient/{name}"] = to_numpy(gradient)
        return total.item(), self.engine.step(1e-3), gradients

    def arrays(self) -> Arrays:
        """What a resume must bring back: adapters, merged weights, log-probs of the policy and of its base."""
        metas = self.engine.tensors()
        with self.engine.gathered(range(len(metas))) as tensors:
            found = {f"weight/{meta.name}": to_numpy(tensor) for meta, tensor in zip(metas, tensors, strict=True)}
        found |= {f"adapter/{name}": to_numpy(tensor) for name, tensor in self.engine.adapters().items()}
        found["logprobs"] = to_numpy(self.engine.evaluate(BATCH))
        return found | {"reference": to_numpy(self.reference.logprobs([BATCH])[0])}

    def go_on(self) -> tuple[dict[str, Any], Arrays]:
        """What the trainer is now, and what two more steps make of it."""
        found = {f"0/{name}": array for name, array in self.arrays().items()}
        steps: list[Any] = []
        for step in (1, 2):
            steps.append(self.step()[:2])
            found |= {f"{step}/{name}": array for name, array in self.arrays().items()}
        return {"steps": steps}, found

    def state(self) -> TrainingState:
        return TrainingState(
            step=STEP, wave=0, branch=0, version=STEP, stream_digest="", seed=1, data="", reference="", kl_beta=BETA,
            ranks=dist.get_world_size(), zero_stage=self.case.stage, precision=self.case.precision, optimizer={},
        )  # fmt: skip

    def save(self) -> None:
        save_checkpoint(
            self.engine, self._checkpoints(dist.get_world_size()), self.state(),
            model_folder=self.folder / self.case.model, keep=3, on_progress=lambda: None, reference=self.reference,
        )  # fmt: skip

    def load(self, ranks: int) -> None:
        load_checkpoint(self.engine, self._checkpoints(ranks), STEP, self.state(), reference=self.reference)

    def _checkpoints(self, ranks: int) -> Path:
        return self.folder / "checkpoints" / f"{self.case.name}-by{ranks}"


def fill(policy: Policy, seed: int) -> None:
    """Draw both factors, alike on every rank: with B = 0 the gradient of A would be 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapter_parameters(policy.model).values():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter.dtype)


def save_all(folder: Path, place: Path, policies: dict[Any, Policy]) -> None:
    for case in CASES:
        trainer = Trainer(folder, case, policies)
        before = {f"before/{name}": array for name, array in trainer.arrays().items()}
        loss, norm, gradients = trainer.step()
        values: dict[str, Any] = {"loss": loss, "norm": norm}
        if case.is_saved:
            trainer.save()
            more, arrays = trainer.go_on()
            values, gradients = values | more, gradients | arrays
        keep(place, case.name, values, before | gradients)
    for stage in (0, 2, 3):
        keep(place, f"fresh-zero{stage}", *fresh(folder, stage, policies))
        keep(place, f"perturbed-zero{stage}", {}, perturbed(folder, stage, policies))


def fresh(folder: Path, stage: Any, policies: dict[Any, Policy]) -> tuple[dict[str, Any], Arrays]:
    """Before and after the first step of a new policy: what it publishes, beside one without adapters."""
    trainer = Trainer(folder, Case(name="", stage=stage), policies, is_fresh=True)
    whole = Trainer(folder, Case(name="", stage=stage, lora=None), policies)
    metas = [[meta.name, meta.dtype, list(meta.shape)] for meta in trainer.engine.tensors()]
    values: dict[str, Any] = {
        "digests": [digests(one.engine) for one in (trainer, whole)],
        "same_metas": trainer.engine.tensors() == whole.engine.tensors(),
        "metas": metas,
        "mean_square": [trainer.engine.mean_square()],
    }
    trainer.step()
    values |= {"later": digests(trainer.engine), "held": held_by_optimizer(trainer.engine)}
    values["mean_square"].append(trainer.engine.mean_square())
    return values, {}


def digests(engine: DeepSpeedEngine) -> list[str]:
    is_first = dist.get_rank() == 0
    return [weights_digest(engine, 0, wire_dtype=wire, is_first_rank=is_first) for wire in ("float32", "bfloat16")]


def held_by_optimizer(engine: DeepSpeedEngine) -> int:
    """Numbers in AdamW's moments, of all ranks."""
    states = engine._engine.optimizer.state.values()
    held = torch.tensor(sum(state[kind].numel() for state in states for kind in ("exp_avg", "exp_avg_sq")))
    if engine.zero_stage > 0:
        dist.all_reduce(held)
    return int(held)


def perturbed(folder: Path, stage: Any, policies: dict[Any, Policy]) -> Arrays:
    trainer = Trainer(folder, Case(name="", stage=stage), policies)
    trainer.step()
    found = {f"before/{name}": array for name, array in trainer.arrays().items()}
    with trainer.engine.perturbed(seed=3, size=0.05):
        found |= {f"inside/{name}": array for name, array in trainer.arrays().items()}
    return found | {f"after/{name}": array for name, array in trainer.arrays().items()}


def load_all(folder: Path, place: Path, policies: dict[Any, Policy]) -> None:
    for case in (case for case in CASES if case.is_saved):
        for ranks in (1, 2):
            trainer = Trainer(folder, case, policies, seed=2)
            trainer.load(ranks)
            keep(place, f"{case.name}-by{ranks}", *trainer.go_on())


def keep(place: Path, name: str, values: dict[str, Any], arrays: Arrays) -> None:
    if dist.get_rank() == 0:
        place.mkdir(exist_ok=True)
        (place / f"{name}.json").write_text(json.dumps(values))
        np.savez(place / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]


def main() -> None:
    phase, folder, address = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    with worker_rank(address, phase):
        {"save": save_all, "load": load_all}[phase](folder, folder / f"{phase}-{dist.get_world_size()}", {})


if __name__ == "__main__":
    main()
    end_process()
