"""LoRA (Hu et al. 2021, arXiv:2106.09685, eq. 3): a layer computes W x + (alpha / rank) B A x; A and B are trained.

peft puts the adapters into the model, in place. What leaves the trainer carries the names and shapes of the model
folder: each weight as W + (alpha / rank) B A. At the start B = 0, and it is the folder's to the bit.

I, O = inputs and outputs of a linear layer, R = rank, V = vocabulary, D = model dim.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from towline.storage.errors import ModelError
from towline.trainer.config import LoraConfig

ADAPTER = "default"
"""peft's name of the only adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A weight of the model folder, and what an adapter adds to it."""

    name: str
    """As in the model folder."""
    base: nn.Parameter
    """[O, I] where there is an adapter."""
    a_RI: nn.Parameter | None = None
    b_OR: nn.Parameter | None = None
    scale: float = 0.0
    """alpha / rank."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that must be whole for `merged`."""
        return [part for part in (self.base, self.a_RI, self.b_OR) if part is not None]

    @torch.no_grad()
    def merged(self) -> Tensor:
        """In the dtype of the base, to which the sum is rounded once; the base itself where there is no adapter."""
        base = self.base.detach()
        if self.a_RI is None or self.b_OR is None:
            return base
        added_OI = (self.b_OR.float() @ self.a_RI.float()).mul_(self.scale)
        # A sum would make 0.0 of the folder's -0.0: another digest for the same weights.
        return torch.where(added_OI == 0, base, (base.float() + added_OI).to(base.dtype))


def add_adapters(model: Any, config: LoraConfig, folder: Path) -> None:
    """Put adapters into a transformers model and freeze all else. A is drawn from torch's generator; B is 0.

    Args:
        folder: that the model was loaded from, for messages and for the exported adapters.

    Raises:
        ModelError: the model has no such linear layers, or its head is asked for and tied.
    """
    # Here, since it takes two seconds that other runs need not wait for.
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    settings = PeftConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=_targets(model, config.target_modules, folder),
        base_model_name_or_path=str(folder),
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(settings, model, ADAPTER)


def model_weights(model: nn.Module) -> list[Weight]:
    """The weights of the model folder, in the order of the model; a tied one once. Adapters are in the weights."""
    layers = {id(layer.get_base_layer().weight): layer for _, layer in _adapted_layers(model)}
    adapters = {id(parameter) for parameter in adapter_parameters(model).values()}
    return [
        Weight(name=name.replace(".base_layer.", "."), base=parameter, **_parts(layers.get(id(parameter))))
        for name, parameter in model.named_parameters()
        if id(parameter) not in adapters
    ]


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """A and B of every adapter, by their names in peft's files. Empty without LoRA."""
    return {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part)[ADAPTER].weight
        for name, layer in _adapted_layers(model)
        for part in ("lora_A", "lora_B")
    }


def head_weight(head: Any) -> Tensor:
    """[V, D], with the head's adapter in it if it has one; gradients flow to what is trained."""
    if not hasattr(head, "lora_A") or head.disable_adapters:
        return head.weight
    return head.weight + head.get_delta_weight(ADAPTER)


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside the block the model computes as the folder's would."""
    layers = [layer for _, layer in _adapted_layers(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def write_adapter_folder(model: Any, adapters: Mapping[str, Tensor], folder: Path) -> None:
    """Write adapters as peft does, so that it can load them onto the model folder.

    Args:
        adapters: whole tensors by the names of `adapter_parameters`.

    Raises:
        OSError, safetensors.SafetensorError: they could not be written.
    """
    folder.mkdir(parents=True)
    model.peft_config[ADAPTER].save_pretrained(folder)
    save_file(dict(adapters), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    # Told by an attribute, so that peft is imported only where there are any.
    return ((name, module) for name, module in model.named_modules() if hasattr(module, "lora_A"))


def _parts(layer: Any) -> dict[str, Any]:
    if layer is None:
        return {}
    return {
        "a_RI": layer.lora_A[ADAPTER].weight,
        "b_OR": layer.lora_B[ADAPTER].weight,
        "scale": layer.scaling[ADAPTER],
    }


def _targets(model: Any, names: tuple[str, ...] | None, folder: Path) -> list[str]:
    """Names for peft: of every linear layer but the head, or those that were asked for."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = [name for name, module in linear.items() if module is not head]
    if names is None:
        if not found:
            raise ModelError(f"policy.model {folder} has no linear layers beside its head: [trainer.lora] needs some")
        return found
    for target in names:
        layers = [module for name, module in linear.items() if f".{name}".endswith(f".{target}")]
        if not layers:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
            raise ModelError(
                f'trainer.lora.target_modules: "{target}" names no linear layer of policy.model {folder}; linear '
                f"layers are: {known}"
            )
        if head in layers and head.weight is model.get_input_embeddings().weight:
            raise ModelError(
                f'trainer.lora.target_modules: "{target}" is the head of policy.model {folder}, whose weight is that '
                "of the embeddings too (tied): an adapter would change one of them and leave the other. Leave it out"
            )
    return list(names)
