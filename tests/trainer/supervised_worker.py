"""One rank of a small trainer: one optimiser step for every scenario of test_supervised_steps.py.

    mpirun -n 2 python supervised_worker.py FOLDER HOST:PORT

FOLDER/policy, FOLDER/small and FOLDER/reward are models, FOLDER/examples.pkl holds what they learn from; rank 0 leaves
FOLDER/ranks-N/NAME.json and NAME.npz for each scenario.
"""

import copy
import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed_worker import Arrays, RecordingEngine
from numpy.typing import NDArray
from worker_rank import end_process, worker_rank

from towline.storage.errors import NumericsError
from towline.trainer.completion_logprobs import completion_logprobs
from towline.trainer.dpo import Dpo
from towline.trainer.pair_step import num_completion_tokens
from towline.trainer.policy import load_policy
from towline.trainer.reward_model import PairReward
from towline.trainer.sequence_head import load_reward_model
from towline.trainer.sft import Sft
from towline.trainer.supervised_config import DpoConfig, RewardModelConfig, SftConfig
from towline.trainer.token_examples import TokenExample, TokenPair

STAGES = (0, 2, 3)
MICRO, WHOLE = 16, 4096
"""Tokens of a micro-batch: of one or two examples, or of all."""
USUAL: dict[str, Any] = {
    "batch_size": 1, "learning_rate": 1e-3, "warmup_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5,
}  # fmt: skip
STEP, TOTAL_STEPS = 3, 10
CONFIGS = {"sft": SftConfig, "dpo": DpoConfig, "reward": RewardModelConfig}
VARIANTS: dict[str, dict[str, Any]] = {
    "sft": {},
    "sft-smoothed": {"label_smoothing": 0.1},
    "dpo": {"beta": 0.3},
    "dpo-ipo": {"beta": 0.3, "loss": "ipo"},
    "dpo-smoothed": {"beta": 0.3, "label_smoothing": 0.2},
    "dpo-per-token": {"beta": 0.3, "length_normalised": True},
    "reward": {"centring": 0.02},
}


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Of all scenarios."""

    demonstrations: list[TokenExample]
    pairs: list[TokenPair]
    reference: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    name: str
    variant: str
    rows: Sequence[int] | None = None
    """None: all."""
    kind: str = "plain"
    settings: dict[str, Any] = field(default_factory=dict)


def scenarios() -> Iterator[Scenario]:
    for objective in CONFIGS:
        for stage in STAGES:
            settings = {"zero_stage": stage, "max_tokens_per_microbatch": MICRO}
            yield Scenario(name=f"{objective}-zero{stage}", variant=objective, settings=settings)
            yield Scenario(name=f"{objective}-single-zero{stage}", variant=objective, rows=[1], settings=settings)
        for packing in ("packed", "buckets"):
            for max_tokens in (MICRO, WHOLE):
                settings = {"packing": packing, "max_tokens_per_microbatch": max_tokens}
                yield Scenario(name=f"{objective}-{packing}-{max_tokens}", variant=objective, settings=settings)
        for stage in STAGES:
            yield Scenario(
                name=f"{objective}-nan-zero{stage}", variant=objective, kind="nan", settings={"zero_stage": stage}
            )
    for variant in ("sft-smoothed", "dpo-ipo", "dpo-smoothed", "dpo-per-token"):
        yield Scenario(name=variant, variant=variant, settings={"max_tokens_per_microbatch": MICRO})
    for variant in ("sft", "dpo", "reward"):
        settings = {"precision": "bfloat16", "zero_stage": 3, "max_tokens_per_microbatch": MICRO}
        yield Scenario(name=f"{variant}-bfloat16", variant=variant, settings=settings)
    for precision in ("float32", "bfloat16"):
        for variant in ("dpo", "dpo-smoothed"):
            settings = {"precision": precision, "max_tokens_per_microbatch": MICRO}
            name = f"{variant}-at-reference-{precision}"
            yield Scenario(name=name, variant=variant, kind="at-reference", settings=settings)
    for objective in CONFIGS:
        settings = {"zero_stage": 3, "max_tokens_per_microbatch": MICRO}
        yield Scenario(name=f"{objective}-taken-up", variant=objective, kind="taken-up", settings=settings)
    yield Scenario(name="dpo-identical", variant="dpo", kind="identical", rows=[0, 1])


class Trainer:
    """A fresh engine with the weights of a folder."""

    def __init__(self, folder: Path, examples: Examples) -> None:
        self.folder, self.examples = folder, examples
        self._models: dict[tuple[str, str, str], Any] = {}
        self.begun: list[str] = []
        """A phase for each micro-batch of this rank."""

    def engine(self, config: Any, folder: str = "policy") -> RecordingEngine:
        return RecordingEngine(copy.deepcopy(self._model(config, folder)), config)

    def _model(self, config: Any, kind: str) -> Any:
        """To load one and to prove that it can be packed takes longer than a step."""
        kind = "reward" if isinstance(config, RewardModelConfig) else kind
        key = (kind, config.precision, config.packing)
        if key not in self._models:
            options: dict[str, Any] = {"precision": config.precision, "packing": config.packing}
            if kind == "reward":
                self._models[key] = load_reward_model(self.folder / kind, head_seed=0, **options)
            else:
                self._models[key] = load_policy(self.folder / kind, temperature=1.0, **options)
        return self._models[key]

    def run(self, scenario: Scenario) -> tuple[dict[str, Any], Arrays]:
        objective = scenario.variant.partition("-")[0]
        settings = USUAL | {"precision": "float32"} | VARIANTS[scenario.variant] | scenario.settings
        config = CONFIGS[objective](**settings)
        if scenario.kind == "taken-up":
            return self._taken_up(config, scenario), {}
        engine = self.engine(config)
        if scenario.kind == "nan":
            with torch.no_grad():
                engine._local(next(engine.policy.parameters())).fill_(torch.nan)
        trained = self._objective(engine, config, scenario)
        self.begun.clear()
        if scenario.kind == "nan":
            return {"said": self._refusal(trained)}, {}
        metrics = trained.take_step(STEP) | {"micro_batches": len(self.begun)}
        is_compared = config.precision == "float32" and scenario.kind != "at-reference"
        return metrics, engine.gradients | engine.weights() if is_compared else {}

    def _objective(self, engine: Any, config: Any, scenario: Scenario) -> Sft | Dpo | PairReward:
        pairs, reference = self.examples.pairs, self.examples.reference
        if scenario.kind == "identical":
            pairs = [TokenPair(row=0, margin=None, chosen=pair.chosen, rejected=pair.chosen) for pair in pairs]
            reference = np.repeat(reference[:, :1], 2, axis=1)
        elif scenario.kind == "at-reference":
            reference = self._own_logprobs(engine, config)
        rows = range(len(pairs)) if scenario.rows is None else scenario.rows
        rest: dict[str, Any] = {
            "engine": engine, "config": config, "rows": {STEP: rows}.__getitem__, "total_steps": TOTAL_STEPS,
            "on_progress": self.begun.append,
        }  # fmt: skip
        match config:
            case SftConfig():
                return Sft(examples=self.examples.demonstrations, **rest)
            case DpoConfig():
                return Dpo(pairs=pairs, reference=reference, **rest)
            case _:
                return PairReward(pairs=pairs, **rest)

    def _own_logprobs(self, engine: RecordingEngine, config: DpoConfig) -> NDArray[np.float64]:
        """As a run computes its reference: of all pairs, in micro-batches that are not those of training."""
        pairs = self.examples.pairs
        sums = completion_logprobs(
            engine,
            config,
            [sequence for pair in pairs for sequence in (pair.chosen, pair.rejected)],
            trained=[np.ones(length, dtype=np.bool_) for pair in pairs for length in num_completion_tokens(pair)],
            groups=[number // 2 for number in range(2 * len(pairs))],
            on_progress=lambda: None,
        )
        return sums.reshape(-1, 2)

    def _taken_up(self, config: Any, scenario: Scenario) -> dict[str, Any]:
        """Losses of a trainer and of one that goes on from its checkpoint; after their next step the weights are read,
        as for the next checkpoint, and they train on."""
        engine, again = (self.engine(config, "small") for _ in range(2))
        first, second = (self._objective(each, config, scenario) for each in (engine, again))
        first.take_step(STEP)
        folder = self.folder / f"{scenario.name}-{dist.get_world_size()}"
        engine.save(folder, {})
        again.load(folder)
        losses: list[list[float]] = []
        for each, trained in ((engine, first), (again, second)):
            before = trained.take_step(STEP)
            each.weights()
            losses.append([row["loss/gradient_norm"] for row in (before, trained.take_step(STEP))])
        return {"norms": losses}

    def _refusal(self, trained: Sft | Dpo | PairReward) -> list[str]:
        """What each rank says."""
        said: list[str] = [""] * dist.get_world_size()
        try:
            error = f"trained: {trained.take_step(STEP)}"
        except NumericsError as numerics:
            error = str(numerics)
        dist.all_gather_object(said, error)
        return said


def main() -> None:
    folder, address = Path(sys.argv[1]), sys.argv[2]
    with worker_rank(address, "supervised"):
        trainer = Trainer(folder, Examples(**pickle.loads((folder / "examples.pkl").read_bytes())))
        place = folder / f"ranks-{dist.get_world_size()}"
        place.mkdir(exist_ok=True)
        for scenario in scenarios():
            found, arrays = trainer.run(scenario)
            if dist.get_rank() == 0:
                (place / f"{scenario.name}.json").write_text(json.dumps(found))
                np.savez(place / f"{scenario.name}.npz", **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
    end_process()
