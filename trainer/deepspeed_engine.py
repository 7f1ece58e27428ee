"""DeepSpeed behind five verbs: accumulate, step, gather weights, save, load. The only file that imports it."""

import argparse
import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from towline.storage.weight_stream import TensorMeta
from towline.trainer.config import EngineConfig
from towline.trainer.fused_loss import TokenLoss
from towline.trainer.lora import adapter_parameters, adapters_off, model_weights
from towline.trainer.packing import PackedBatch
from towline.trainer.policy import Policy
from towline.trainer.sequence_head import RewardModel

os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
import deepspeed
from deepspeed.checkpoint import ds_to_universal
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

# On CPU its extension would be compiled for half a minute at first use, for a faster all-reduce that gloo does too.
deepspeed.ops.__compatible_ops__[ShareMemCommBuilder.NAME] = False


_TAG = "engine"
"""Name of DeepSpeed's own folder in a checkpoint."""


Trained = TypeVar("Trained", Policy, RewardModel)


class DeepSpeedEngine(Generic[Trained]):
    """A policy or a reward model, and its optimiser, sharded over the ranks of torch's default process group.

    Call order of one optimiser step, with the same number of micro-batches on every rank:

        for number, batch in enumerate(batches):
            logprobs, entropies = engine.forward(batch)
            engine.backward(loss, is_last=number == len(batches) - 1)
        gradient_norm = engine.step(learning_rate)

    The loss is the *sum* over the loss tokens of this rank, weighted by the normaliser of the whole step; gradients add
    up over micro-batches and ranks, so that no number of either changes them.
    """

    def __init__(self, policy: Trained, config: EngineConfig) -> None:
        self.policy = policy
        self.zero_stage = config.zero_stage
        self._world_size = dist.get_world_size()
        self._adam = torch.optim.AdamW(
            [parameter for parameter in policy.parameters() if parameter.requires_grad],
            lr=config.learning_rate,
            betas=config.adam_betas,
            weight_decay=config.weight_decay,
            # One pass over the numbers of a weight; on CPU torch's choice is a dozen.
            fused=True if not torch.cuda.is_available() else None,
        )
        # Any: what is behind it depends on the ZeRO stage.
        self._engine: Any = deepspeed.initialize(
            model=policy, optimizer=self._adam, config=_settings(config), dist_init_required=False
        )[0]
        if self.zero_stage == 3:
            # DeepSpeed finds them by itself only where they are not whole at first; after a load small ones are, and
            # it would end the run ("tracing error") when they were sharded again.
            for parameter in policy.direct_parameters:
                deepspeed.zero.register_external_parameter(policy, parameter)
        if self._world_size == 1:
            # Nothing to add up: it would copy all gradients into one tensor and back.
            self._engine.allreduce_and_copy = lambda *_, **__: None
        self._weights = model_weights(policy.model)
        self._adapters = adapter_parameters(policy.model)

    def forward(self, batch: PackedBatch, *, with_entropy: bool = False) -> tuple[Tensor, Tensor]:
        return self._engine(batch, with_entropy=with_entropy)

    def forward_with_loss(
        self,
        batch: PackedBatch,
        token_loss: TokenLoss,
        *,
        with_entropy: bool = True,
        label_smoothing: float = 0.0,
        groups: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, log-probs and entropies in one pass over the logits, see `Policy.forward`; one backward may follow."""
        options = {"with_entropy": with_entropy, "label_smoothing": label_smoothing, "groups": groups}
        return self._engine(batch, token_loss=token_loss, **options)

    def scores(self, batch: PackedBatch, positions_S: NDArray[np.int64]) -> Tensor:
        """Of a reward model at these positions, see `RewardModel.forward`."""
        return self._engine(batch, positions_S)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(is_last)
        # DeepSpeed averages over ranks; the loss is a share of a sum.
        self._engine.backward(loss * self._world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float:
        """Apply the gathered gradients; return their L2 norm before clipping."""
        for group in self._engine.optimizer.param_groups:
            group["lr"] = learning_rate
        own_norm = self._gradient_norm()
        self._engine.step()
        norm = self._engine.get_global_grad_norm() if own_norm is None else own_norm
        assert norm is not None, "DeepSpeed was not told to leave the norm out"
        return float(norm)

    @contextlib.contextmanager
    def before_first_step(self) -> Iterator[None]:
        """A step with learning rate 0 in the block is forgotten after it, to the bit: AdamW begins with moments of 0.

        Its own count of steps need not: DeepSpeed begins with one of empty gradients in bfloat16 without ZeRO. All is
        put back in place, since DeepSpeed holds on to these tensors.
        """
        engine = self._engine
        assert engine.global_steps == 0, f"{engine.global_steps} optimiser steps were taken, need a fresh start"
        counts = {parameter: state["step"].clone() for parameter, state in self._adam.state.items()}
        yield
        for parameter, state in self._adam.state.items():
            for value in state.values():
                value.zero_()
            if parameter in counts:
                state["step"].copy_(counts[parameter])
        engine.global_steps = engine.global_samples = engine.micro_steps = engine.skipped_steps = 0

    def evaluate(self, batch: PackedBatch) -> Tensor:
        """Log-probs without gradient. Every rank must call it: ZeRO-3 gathers."""
        return self._evaluated(batch)[0]

    def evaluate_scores(self, batch: PackedBatch, positions_S: NDArray[np.int64]) -> Tensor:
        """Of a reward model, without gradient. Every rank must call it."""
        return self._evaluated(batch, positions_S)

    @torch.no_grad()
    def _evaluated(self, *arguments: Any) -> Any:
        self._engine.eval()
        try:
            return self._engine(*arguments)
        finally:
            self._engine.train()

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Inside the block `evaluate` gives the log-probs of the model folder."""
        with adapters_off(self.policy.model):
            yield

    @torch.no_grad()
    def mean_square(self) -> float:
        """Of what is trained on this rank, in float64: it tells whether it moved, for the price of reading it."""
        parts = [self._local(parameter) for parameter in self.policy.parameters() if parameter.requires_grad]
        total = sum(part.double().square().sum().item() for part in parts)
        return total / max(1, sum(part.numel() for part in parts))

    @property
    def device(self) -> torch.device:
        return self._engine.device

    def tensors(self) -> list[TensorMeta]:
        """Name (as in the model folder), dtype and full shape of each weight; a tied one appears once."""
        return [
            TensorMeta(
                name=weight.name,
                dtype=str(weight.base.dtype).removeprefix("torch."),
                shape=tuple(getattr(weight.base, "ds_shape", weight.base.shape)),
            )
            for weight in self._weights
        ]

    @contextlib.contextmanager
    def gathered(self, indices: Sequence[int]) -> Iterator[list[Tensor]]:
        """The full tensors of some weights, with their adapters merged, valid inside the block.

        Every rank must enter, in the same order.
        """
        weights = [self._weights[index] for index in indices]
        with self._whole([parameter for weight in weights for parameter in weight.parameters]):
            yield [weight.merged() for weight in weights]

    def adapters(self) -> dict[str, Tensor]:
        """A and B of all adapters, whole and in main memory, by their names in peft's files; empty without LoRA.

        Every rank must call it.
        """
        with self._whole(list(self._adapters.values())):
            return {name: parameter.detach().to("cpu", copy=True) for name, parameter in self._adapters.items()}

    @contextlib.contextmanager
    def perturbed(self, seed: int, size: float) -> Iterator[None]:
        """Inside the block every weight carries noise of `size` times its standard deviation; then all is as before.

        With adapters the frozen weights do, and with them the merged ones.
        """
        locals_ = [self._local(weight.base) for weight in self._weights]
        saved = [tensor.clone() for tensor in locals_]
        # Shards differ from rank to rank, replicas must not.
        generator = torch.Generator().manual_seed(seed + (dist.get_rank() if self.zero_stage == 3 else 0))
        with torch.no_grad():
            for tensor in locals_:
                noise = torch.randn(tensor.shape, generator=generator).to(tensor)
                spread = tensor.float().std(correction=0).clamp(min=1e-3) if tensor.numel() else 1.0
                tensor.add_(noise * (size * spread))
        self._drop_whole_copies()
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(locals_, saved, strict=True):
                    tensor.copy_(before)
            self._drop_whole_copies()

    def save(self, folder: Path, client_state: dict[str, Any]) -> None:
        """Write this rank's part of a checkpoint to `folder`/engine, without frozen weights. Every rank must call it.

        Raises:
            OSError, RuntimeError: this rank could not write; raised when every rank is through.
        """
        writer = self._engine.checkpoint_engine
        self._engine.checkpoint_engine = patient = _PatientWriter(writer)
        # It would copy scripts that gather weights; on a full disk that fails between barriers.
        self._engine._copy_recovery_script = lambda path: None
        try:
            self._engine.save_checkpoint(
                str(folder), tag=_TAG, client_state=client_state, save_latest=False, exclude_frozen_parameters=True
            )
        finally:
            self._engine.checkpoint_engine = writer
        if patient.failure is not None:
            raise patient.failure

    def load(self, folder: Path, *, is_universal: bool = False) -> dict[str, Any]:
        """Take up what `save` wrote with as many ranks, or what `convert_to_universal` made of it."""
        self._engine._config.load_universal_checkpoint = is_universal
        try:
            path, client_state = self._engine.load_checkpoint(
                str(folder), tag=_TAG, load_module_strict=not self._adapters
            )
        finally:
            self._engine._config.load_universal_checkpoint = False
        if path is None:
            raise FileNotFoundError(f"{folder}/{_TAG}")
        return client_state

    def _drop_whole_copies(self) -> None:
        """Make ZeRO-3 gather again: after a forward it keeps small weights whole, and would not see a changed shard."""
        whole = [
            parameter
            for parameter in self.policy.parameters()
            if getattr(parameter, "ds_status", None) is deepspeed.zero.ZeroParamStatus.AVAILABLE
        ]
        if whole:
            whole[0].partition(param_list=whole)  # pyright: ignore[reportAttributeAccessIssue]

    def _gradient_norm(self) -> Tensor | None:
        """Only in float32 without ZeRO, where DeepSpeed clips and says nothing; gradients are those of all ranks."""
        if self.zero_stage > 0 or self._engine.bfloat16_enabled():
            return None
        norms = [
            torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
            for parameter in self.policy.parameters()
            if parameter.grad is not None
        ]
        return torch.linalg.vector_norm(torch.stack(norms))

    def _whole(self, parameters: list[torch.nn.Parameter]) -> AbstractContextManager[Any]:
        if self.zero_stage < 3:
            return contextlib.nullcontext()
        return deepspeed.zero.GatheredParameters(parameters)

    @staticmethod
    def _local(parameter: torch.nn.Parameter) -> Tensor:
        """What this rank holds of a weight: its shard under ZeRO-3, else the whole."""
        shard = getattr(parameter, "ds_tensor", None)
        return parameter.data if shard is None else shard.data


class _PatientWriter:
    """DeepSpeed's writer of files, but a failure waits: who raises between barriers leaves the other ranks there."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self.failure: OSError | RuntimeError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def save(self, state_dict: Any, path: str) -> None:
        try:
            self._writer.save(state_dict, path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            self.failure = error


def convert_to_universal(source: Path, target: Path) -> None:
    """Make of the parts that N ranks saved under `source` whole tensors under `target`, for any number of ranks.

    One rank calls it. It takes about as much time as the checkpoint took to write, and twice its space while it runs.
    """
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=str(source / _TAG),
            output_folder=str(target / _TAG),
            strict=True,
            inject_missing_state=True,
            **options,
        )
    )


def shard_frozen(policy: Policy, config: EngineConfig, *, is_offloaded: bool = False) -> Any:
    """Wrap a frozen policy so that it is sharded as the trained one is. Call it like the policy, on every rank.

    Args:
        is_offloaded: with ZeRO-3, shards lie in main memory, and each layer's weights are brought to the device when
            its turn comes. Other stages have no shards: see `OffloadedWeights`.
    """
    policy.requires_grad_(False).eval()
    if config.zero_stage < 3:
        return policy
    settings = _settings(config)
    if is_offloaded:
        settings["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    engine, *_ = deepspeed.initialize(model=policy, config=settings, dist_init_required=False)
    return engine


@torch.no_grad()
def overwrite(frozen: Any, model: torch.nn.Module) -> None:
    """Give what `shard_frozen` returned the weights of a model of the same make. Every rank must call it.

    Args:
        model: in main memory, whole on every rank.
    """
    weights = dict(model.named_parameters())
    policy = getattr(frozen, "module", frozen)
    named = dict(policy.model.named_parameters())
    assert named.keys() == weights.keys(), "a model of another make"
    for name, parameter in named.items():
        if frozen is policy:
            parameter.copy_(weights[name])
            continue
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.copy_(weights[name])


def _settings(config: EngineConfig) -> dict[str, Any]:
    return {
        # Micro-batches are packed by tokens, so DeepSpeed's own counting of examples is not used.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": config.precision == "bfloat16"},
        "steps_per_print": 10**9,
        "zero_optimization": {
            "stage": config.zero_stage,
            "overlap_comm": torch.cuda.is_available(),
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
