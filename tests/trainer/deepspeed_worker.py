"""One rank of a small trainer: runs every scenario of test_deepspeed_engine.py that its number of ranks allows.

    mpirun -n 2 python deepspeed_worker.py FOLDER HOST:PORT

FOLDER holds the models and the pickled groups; rank 0 leaves there, for each scenario, `NAME.json` and `NAME.npz`.
"""

import copy
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.utils import safe_get_full_grad
from torch import Tensor
from worker_rank import end_process, worker_rank

from towline.storage.errors import NumericsError, RewardError
from towline.trainer.config import TrainerConfig
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.fused_loss import TokenLoss
from towline.trainer.grpo import take_inner_steps
from towline.trainer.packing import PackedBatch, TokenSequence, pack
from towline.trainer.packing_step import Packing
from towline.trainer.policy import Policy, load_policy
from towline.trainer.reference import Reference

TEMPERATURE = 0.7
STAGES = (0, 1, 2, 3)
MICRO_BATCHES = {1: 4096, 2: 90, 4: 48}
"""Of one rank: tokens that fit into each. Of two ranks half as many."""
FAMILY: dict[str, dict[str, Any]] = {
    "gspo": {"ratio": "sequence", "normaliser": "sequence", "clip": 0.02, "clip_high": 0.04},
    "cispo": {"surrogate": "cispo", "clip": 0.1},
    "rloo": {"baseline": "leave_one_out", "scale": "none", "kl_beta": 0.0},
    "reinforce++": {"baseline": "batch", "scale": "batch_std", "kl_place": "reward"},
    "recomputed": {"old": "recomputed", "correction": "truncated", "correction_high": 1.1},
    "masked": {"old": "recomputed", "correction": "masked", "correction_low": 0.9, "correction_high": 1.2},
    "unbiased": {"kl_estimator": "k3_unbiased"},
}
DAPO = {"clip_high": 0.28, "masks_truncated": True, "kl_beta": 0.0}
"""Members of the family by their settings."""
NOT_FINITE: dict[str, dict[str, Any]] = {
    "in the ratio": {},
    "in the correction": {"old": "recomputed", "correction": "masked"},
    "in the reward": {"kl_place": "reward"},
}
"""Where a log-prob of the engine that is NaN gets to."""
Arrays = dict[str, np.ndarray]


class RecordingEngine(DeepSpeedEngine):
    """Looks at the gradients that DeepSpeed is about to apply."""

    def step(self, learning_rate: float) -> float:
        self.gradients = {}
        for name, parameter in self.policy.model.named_parameters():
            gradient = safe_get_full_grad(parameter)
            assert gradient is not None, name
            self.gradients[f"gradient/{name}"] = to_numpy(gradient)
        return super().step(learning_rate)

    def optimizer_state(self) -> Arrays:
        """AdamW's of this rank, and every number that DeepSpeed keeps of itself."""
        tensors = {
            f"state/{place}/{name}": to_numpy(value)
            for place, state in enumerate(self._adam.state.values())
            for name, value in state.items()
        }
        numbers = {
            f"number/{type(owner).__name__}/{name}": np.array(float(value))
            for owner in (self._engine, self._engine.optimizer)
            for name, value in vars(owner).items()
            if isinstance(value, int | float)
        }
        return tensors | numbers

    def weights(self) -> Arrays:
        metas = self.tensors()
        with self.gathered(range(len(metas))) as tensors:
            return {f"weight/{meta.name}": to_numpy(tensor) for meta, tensor in zip(metas, tensors, strict=True)}


class TwoPassEngine(RecordingEngine):
    """Computes the logits again in backward, whatever the loss: the loop's other way, for every loss."""

    def forward_with_loss(self, batch: PackedBatch, token_loss: TokenLoss) -> tuple[Tensor, Tensor, Tensor]:
        logprobs_N, entropy_N = self.forward(batch, with_entropy=True)
        losses, slopes_N = token_loss(logprobs_N.detach(), slice(None))
        return losses.sum() + (slopes_N * (logprobs_N - logprobs_N.detach())).sum(), logprobs_N.detach(), entropy_N


class DecayingEngine(RecordingEngine):
    """Its weight decay does not know the learning rate."""

    def step(self, learning_rate: float) -> float:
        norm = super().step(learning_rate)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                self._local(parameter).mul_(0.999)
        return norm


class DroppingEngine(RecordingEngine):
    """Dropout was left on."""

    def __init__(self, policy: Policy, config: TrainerConfig) -> None:
        embeddings = policy.model.get_input_embeddings()
        embeddings.register_forward_hook(lambda module, _, states: F.dropout(states, 0.1, module.training))
        super().__init__(policy, config)


class CountingEngine(RecordingEngine):
    """A buffer changes with each pass."""

    def __init__(self, policy: Policy, config: TrainerConfig) -> None:
        embeddings = policy.model.get_input_embeddings()
        embeddings.register_buffer("passes", torch.zeros(()), persistent=False)
        embeddings.register_forward_hook(lambda module, _, states: states * (1 + 0.01 * module.passes.add_(1)))
        super().__init__(policy, config)


class ExplodingEngine(RecordingEngine):
    """The loss is finite, its gradient is not."""

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        super().backward(loss * float("inf"), is_last=is_last)


PLANTED = {"decay": DecayingEngine, "dropout": DroppingEngine, "buffer": CountingEngine}
"""What a step with learning rate 0 must tell, by the fault."""


class CopiedReference(Reference):
    """As a folder would give it, from a policy that was loaded before."""

    def __init__(self, policy: Policy, config: TrainerConfig) -> None:
        self._copied = policy
        super().__init__(Path(), config, temperature=TEMPERATURE)

    def _load(self, folder: Path) -> Policy:
        return self._copied


class RecordingReference:
    """Remembers what it was asked."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self.answers: list[tuple[PackedBatch, Tensor]] = []

    def logprobs(self, batches: Iterable[PackedBatch]) -> list[Tensor]:
        asked = list(batches)
        answers = self._reference.logprobs(asked)
        self.answers += zip(asked, answers, strict=True)
        return answers


def to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().numpy().copy()


class Scenarios:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.groups = pickle.loads((folder / "groups.pkl").read_bytes())
        self._policies: dict[tuple[str, str, str], Policy] = {}

    def config(self, **settings: Any) -> TrainerConfig:
        usual = {"learning_rate": 1e-3, "precision": "float32", "kl_beta": 0.1, "max_grad_norm": 0.5}
        # Unchecked, so that the learning rate may be 0.
        return TrainerConfig(learning_rate=1).model_copy(update=usual | settings)

    def policy(self, model: str, precision: str, packing: Packing = "packed") -> Policy:
        """A copy: to load one and to prove that it can be packed takes longer than most scenarios."""
        key = (model, precision, packing)
        if key not in self._policies:
            self._policies[key] = load_policy(
                self.folder / model, temperature=TEMPERATURE, precision=precision, packing=packing
            )
        return copy.deepcopy(self._policies[key])

    def engine(
        self, model: str, config: TrainerConfig, make: type[RecordingEngine] = RecordingEngine
    ) -> RecordingEngine:
        policy = self.policy(model, config.precision, config.packing)
        if config.gradient_checkpointing:
            policy = load_policy(
                self.folder / model, temperature=TEMPERATURE, precision=config.precision, gradient_checkpointing=True
            )
        return make(policy, config)

    def reference(self, model: str, config: TrainerConfig) -> Reference:
        return CopiedReference(self.policy(model, config.precision, config.packing), config)

    def inner_steps(
        self, engine: DeepSpeedEngine, reference: Any, config: TrainerConfig, groups: str, step: int = 0, **options: Any
    ) -> dict[str, float]:
        return take_inner_steps(
            engine, reference, config, self.groups[groups], step=step, seed=1, max_completion_tokens=20,
            on_progress=lambda phase: None, **options,
        )  # fmt: skip

    def one_step(
        self,
        model: str = "tied",
        *,
        groups: str | None = None,
        reference: str = "other",
        make: type[RecordingEngine] = RecordingEngine,
        **settings: Any,
    ):
        """A training step on a fresh engine: metrics, the gradients of its last inner step, the weights after it."""
        config = self.config(**settings)
        engine = self.engine(model, config, make)
        before = engine.weights()
        with_reference = self.reference(reference, config) if config.kl_beta > 0 else None
        metrics = self.inner_steps(engine, with_reference, config, groups or model)
        after = engine.weights()
        moved = max(np.abs(after[name] - before[name]).max() for name in before)
        return metrics | {"moved": float(moved)}, engine.gradients | after

    def inner_epochs(self, zero_stage: int):
        """Two epochs over two minibatches, once with learning rate 0: then the second epoch repeats the first."""
        config = self.config(
            zero_stage=zero_stage, inner_epochs=2, minibatches=2, max_tokens_per_microbatch=24, learning_rate=0.0
        )
        engine = self.engine("tied", config)
        reference = RecordingReference(Reference(self.folder / "other", config, temperature=TEMPERATURE))
        still = self.inner_steps(engine, reference, config, "tied")
        fresh = self.policy("other", "float32")
        with torch.no_grad():
            errors = [(fresh(batch)[0] - answer).abs() for batch, answer in reference.answers]
        once = self.one_step(zero_stage=zero_stage, minibatches=2, max_tokens_per_microbatch=24, learning_rate=0.0)[0]
        moving = self.one_step(zero_stage=zero_stage, inner_epochs=2, minibatches=2, max_tokens_per_microbatch=24)
        found = {
            "asked": len(reference.answers),
            "asked_twice": len(reference.answers) - len({batch.token_ids.tobytes() for batch, _ in reference.answers}),
            "reference_error": max(error.max().item() if len(error) else 0.0 for error in errors),
            "still": still,
            "once": once,
            "moving": moving[0],
        }
        return found, moving[1]

    def perturbed(self, model: str, precision: str, zero_stage: int):
        config = self.config(zero_stage=zero_stage, precision=precision)
        engine = self.engine(model, config)
        batch = pack([TokenSequence(token_ids=np.arange(1, 30), num_prompt_tokens=1)])
        found: Arrays = {}
        # Once as loaded and once after a step, when ZeRO-3 holds some weights whole.
        for moment in ("loaded", "trained"):
            if moment == "trained":
                self.inner_steps(engine, self.reference("other", config), config, model)
            found |= {f"{moment}/before/logprobs": to_numpy(engine.evaluate(batch))}
            found |= {f"{moment}/before/{name}": array for name, array in engine.weights().items()}
            engine.evaluate(batch)
            with engine.perturbed(seed=3, size=0.05):
                found |= {f"{moment}/inside/logprobs": to_numpy(engine.evaluate(batch))}
                found |= {f"{moment}/inside/{name}": array for name, array in engine.weights().items()}
                found |= {f"{moment}/inside/again": to_numpy(engine.evaluate(batch))}
            found |= {f"{moment}/after/logprobs": to_numpy(engine.evaluate(batch))}
            found |= {f"{moment}/after/{name}": array for name, array in engine.weights().items()}
        metrics = self.inner_steps(engine, self.reference("other", config), config, model, step=1)
        return metrics, found

    def tensors(self, model: str, zero_stage: int):
        engine = self.engine(model, self.config(zero_stage=zero_stage))
        metas = engine.tensors()
        one_by_one: Arrays = {}
        for index, meta in enumerate(metas):
            with engine.gathered([index]) as (tensor,):
                one_by_one[f"weight/{meta.name}"] = to_numpy(tensor)
        return {"metas": [[meta.name, meta.dtype, list(meta.shape)] for meta in metas]}, one_by_one

    def resumed(self, zero_stage: int, precision: str):
        """Two steps, and two steps with another process's memory in between: a fresh engine that loads a checkpoint."""
        config = self.config(zero_stage=zero_stage, precision=precision, weight_decay=0.1)
        kept = self.folder / f"checkpoint-{precision}-{zero_stage}"
        batch = pack([TokenSequence(token_ids=np.arange(1, 30), num_prompt_tokens=1)])
        engine, reference = self.engine("tied", config), self.reference("other", config)
        self.inner_steps(engine, reference, config, "tied")
        engine.save(kept, {"step": 1})
        found = {f"saved/{name}": array for name, array in engine.weights().items()}
        found["saved/logprobs"] = to_numpy(engine.evaluate(batch))
        norms = {}
        for step in (1, 2):
            norms[f"straight/{step}"] = self.inner_steps(engine, reference, config, "tied", step=step)
            found |= {f"straight/{step}/{name}": array for name, array in engine.weights().items()}

        resumed = self.engine("other", config)
        state = resumed.load(kept)
        found |= {f"loaded/{name}": array for name, array in resumed.weights().items()}
        found["loaded/logprobs"] = to_numpy(resumed.evaluate(batch))
        for step in (1, 2):
            norms[f"resumed/{step}"] = self.inner_steps(resumed, reference, config, "tied", step=step)
            found |= {f"resumed/{step}/{name}": array for name, array in resumed.weights().items()}
        return norms | {"client_state": state["step"]}, found

    def checked(self, zero_stage: int, precision: str):
        """Two steps after the checks of a fresh start, and the same two without."""
        config = self.config(zero_stage=zero_stage, precision=precision, weight_decay=0.1, max_tokens_per_microbatch=48)
        values: dict[str, dict[str, float]] = {}
        found: Arrays = {}
        for way in ("checked", "plain"):
            engine, reference = self.engine("tied", config), self.reference("other", config)
            for step in (0, 1):
                is_start = way == "checked" and step == 0
                values[f"{way}/{step}"] = self.inner_steps(
                    engine, reference, config, "tied", step=step, is_start=is_start
                )
            found |= {f"{way}/{name}": array for name, array in (engine.weights() | engine.optimizer_state()).items()}
        return values, found

    def planted(self, make: type[RecordingEngine]):
        config = self.config(zero_stage=0, max_tokens_per_microbatch=48)
        engine = self.engine("tied", config, make)
        return self.inner_steps(engine, self.reference("other", config), config, "tied", is_start=True), {}

    def not_finite(self, zero_stage: int, precision: str):
        config = self.config(zero_stage=zero_stage, precision=precision)
        engine = self.engine("tied", config, ExplodingEngine)
        said: list[Any] = [None] * dist.get_world_size()
        try:
            error = self.inner_steps(engine, self.reference("other", config), config, "tied", step=7)
        except NumericsError as numerics:
            error = str(numerics)
        dist.all_gather_object(said, error)
        return {"said": said}, {}

    def refused(self, groups: str, **settings: Any):
        """What a step that cannot be trained on says, on this rank, and how far it moved the weights."""
        config = self.config(zero_stage=2, **settings)
        engine = self.engine("tied", config)
        before = engine.weights()
        try:
            self.inner_steps(engine, self.reference("other", config), config, groups, step=7)
        except (NumericsError, RewardError) as error:
            after = engine.weights()
            moved = max(np.abs(after[name] - before[name]).max() for name in before)
            return {"error": f"{type(error).__name__}: {error}", "moved": float(moved)}, {}
        return {"error": None}, {}


Scenario = Callable[[], tuple[dict[str, Any], Arrays]]


def scenarios(s: Scenarios, num_ranks: int) -> Iterator[tuple[str, Scenario]]:
    """Name and work of each; those that differ between numbers of ranks run on both."""
    for stage in STAGES:
        for model in ("tied", "untied"):
            yield f"{model}-zero{stage}", lambda m=model, z=stage: s.one_step(m, zero_stage=z)
        yield (
            f"three-zero{stage}",
            lambda z=stage: s.one_step(groups="three", zero_stage=z, max_tokens_per_microbatch=16),
        )
    for normaliser in ("sequence", "constant"):
        yield f"{normaliser}-zero2", lambda n=normaliser: s.one_step(normaliser=n, zero_stage=2)
    for member, settings in FAMILY.items():
        yield f"{member}-zero2", lambda s_=settings: s.one_step(zero_stage=2, **s_)
    yield "cut-zero2", lambda: s.one_step(groups="cut", zero_stage=2, **DAPO)
    for number, max_tokens in MICRO_BATCHES.items():
        yield f"accumulation-{number}", lambda t=max_tokens: s.one_step(zero_stage=2, max_tokens_per_microbatch=t)
    for stage in STAGES:
        for precision in ("float32", "bfloat16"):
            yield f"checked-{precision}-zero{stage}", lambda p=precision, z=stage: s.checked(z, p)
    if num_ranks == 1:
        for fault, make in PLANTED.items():
            yield f"planted-{fault}", lambda m=make: s.planted(m)
        return
    for member, settings in FAMILY.items():
        yield f"{member}-zero3", lambda s_=settings: s.one_step(zero_stage=3, **s_)
        yield f"{member}-micro", lambda s_=settings: s.one_step(zero_stage=2, max_tokens_per_microbatch=32, **s_)
    yield "shuffled-zero2", lambda: s.one_step(groups="shuffled", zero_stage=2)
    yield "equal-clips-zero2", lambda: s.one_step(zero_stage=2, clip_high=0.2, masks_truncated=True)
    for old in ("rollout", "recomputed"):
        yield f"on-policy-{old}", lambda o=old: s.one_step(groups="on-policy", zero_stage=2, kl_beta=0.0, old=o)
    for stage in STAGES:
        yield f"micro-zero{stage}", lambda z=stage: s.one_step(zero_stage=z, max_tokens_per_microbatch=32)
        yield f"buckets-zero{stage}", lambda z=stage: s.one_step(zero_stage=z, packing="buckets")
        yield f"warmup-zero{stage}", lambda z=stage: s.one_step(zero_stage=z, warmup_steps=4)
        yield f"bfloat16-zero{stage}", lambda z=stage: s.one_step(zero_stage=z, precision="bfloat16")
    for stage in (2, 3):
        yield f"checkpointing-zero{stage}", lambda z=stage: s.one_step(zero_stage=z, gradient_checkpointing=True)
        yield f"still-zero{stage}", lambda z=stage: s.one_step(zero_stage=z, learning_rate=0.0)
        yield f"unpenalised-zero{stage}", lambda z=stage: s.one_step(zero_stage=z, kl_beta=0.0)
        yield f"at-reference-zero{stage}", lambda z=stage: s.one_step(zero_stage=z, reference="tied")
        yield f"epochs-zero{stage}", lambda z=stage: s.inner_epochs(z)
        for precision in ("float32", "bfloat16"):
            yield f"resumed-{precision}-zero{stage}", lambda p=precision, z=stage: s.resumed(z, p)
    for stage in (0, 2, 3):
        yield f"perturbed-zero{stage}", lambda z=stage: s.perturbed("untied", "float32", z)
        yield f"tensors-tied-zero{stage}", lambda z=stage: s.tensors("tied", z)
        yield f"tensors-untied-zero{stage}", lambda z=stage: s.tensors("untied", z)
    for stage in STAGES:
        for model in ("tied", "untied"):
            yield (
                f"two-passes-{model}-zero{stage}",
                lambda m=model, z=stage: s.one_step(m, zero_stage=z, make=TwoPassEngine),
            )
        yield (
            f"two-passes-bfloat16-zero{stage}",
            lambda z=stage: s.one_step(zero_stage=z, precision="bfloat16", make=TwoPassEngine),
        )
    yield "perturbed-bfloat16-zero3", lambda: s.perturbed("tied", "bfloat16", 3)
    yield "failed", lambda: s.refused("failed")
    yield "single", lambda: s.refused("single")
    yield "all-cut", lambda: s.refused("all-cut", masks_truncated=True)
    for name, settings in NOT_FINITE.items():
        yield f"nan-{name}", lambda s_=settings: s.refused("nan", **s_)
    for stage in STAGES:
        for precision in ("float32", "bfloat16"):
            yield f"not-finite-{precision}-zero{stage}", lambda p=precision, z=stage: s.not_finite(z, p)


def main() -> None:
    folder, address = Path(sys.argv[1]), sys.argv[2]
    chosen = sys.argv[3:]
    with worker_rank(address, "ranks"):
        for name, run in scenarios(Scenarios(folder), dist.get_world_size()):
            if chosen and name not in chosen:
                continue
            found, arrays = run()
            if dist.get_rank() == 0:
                place = folder / f"ranks-{dist.get_world_size()}"
                place.mkdir(exist_ok=True)
                (place / f"{name}.json").write_text(json.dumps(found))
                np.savez(place / f"{name}.npz", **arrays)  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
    end_process()
