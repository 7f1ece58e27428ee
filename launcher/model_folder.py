"""What a model folder says about itself without being loaded: sizes from config.json and the weights' headers."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from towline.storage.errors import ModelError
from towline.trainer.config import LoraConfig

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MAX_HEADER_BYTES = 100_000_000
_OUTPUT_LAYER = ("lm_head.weight", "embed_out.weight")
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    num_parameters: int
    """A tied weight counts once."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocabulary: int
    num_embedding_parameters: int
    """Of the input embeddings, and of the output layer if it is not the same."""
    max_positions: int | None
    """`max_position_embeddings`: the longest context the model was made for, tokens."""
    layers: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Outputs and inputs of linear layers, and of the tables of the vocabulary, by name. Empty where weights are
    pickles."""

    def adapter_parameters(self, lora: LoraConfig) -> int | None:
        """rank x (inputs + outputs) of each layer that gets an adapter; None where `layers` is empty."""
        if not self.layers:
            return None
        return sum(lora.rank * sum(shape) for name, shape in self.layers.items() if self._is_adapted(name, shape, lora))

    def _is_adapted(self, name: str, shape: tuple[int, int], lora: LoraConfig) -> bool:
        if lora.target_modules is None:
            return shape[0] != self.vocabulary
        return any(_is_named(name, target) for target in lora.target_modules)

    def unknown_targets(self, lora: LoraConfig) -> list[str]:
        """Of `target_modules`, those that name no layer; none where `layers` is empty."""
        targets = lora.target_modules or () if self.layers else ()
        return [target for target in targets if not any(_is_named(name, target) for name in self.layers)]

    @property
    def layer_names(self) -> list[str]:
        """What `target_modules` may name."""
        return sorted({name.rpartition(".")[2] for name, shape in self.layers.items() if shape[0] != self.vocabulary})


def _is_named(name: str, target: str) -> bool:
    """As peft matches names: the whole of it, or its end after a dot."""
    return f".{name}".endswith(f".{target}")


def looks_like_hub_name(written: str, folder: Path) -> bool:
    """Whether a `policy.model` that is no folder was meant as ORGANISATION/NAME: not even its first part is there."""
    return _HUB_NAME.fullmatch(written) is not None and not folder.exists() and not folder.parent.exists()


def read_sizes(folder: Path) -> ModelSizes:
    """Read the sizes of a causal language model in Hugging Face layout.

    Raises:
        ModelError: a file is missing or unreadable.
    """
    if not folder.is_dir():
        raise ModelError(f"policy.model {folder} is not a folder; expected config.json, weights and a tokenizer in it.")
    config = _read_config(folder)
    text = cast("dict[str, Any]", config.get("text_config", config))
    try:
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        shapes = _shapes(folder)
        num_parameters, num_tables = _count_parameters(
            folder, shapes, str(config.get("dtype") or config.get("torch_dtype"))
        )
        return ModelSizes(
            num_parameters=num_parameters,
            num_embedding_parameters=num_tables * int(text["vocab_size"]) * hidden,
            num_layers=int(text["num_hidden_layers"]),
            num_kv_heads=int(text.get("num_key_value_heads") or heads),
            head_dim=int(text.get("head_dim") or hidden // heads),
            hidden_size=hidden,
            vocabulary=int(text["vocab_size"]),
            max_positions=text.get("max_position_embeddings"),
            layers={name.removesuffix(".weight"): (s[0], s[1]) for name, s in shapes or () if len(s) == 2},
        )
    except KeyError as error:
        raise ModelError(
            f"policy.model {folder}: config.json has no {error.args[0]}; is it a language model?"
        ) from None


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        inside = ", ".join(sorted(item.name for item in folder.iterdir())[:8]) or "nothing"
        raise ModelError(
            f"policy.model {folder} has no config.json (found {inside}); expected a folder in Hugging Face layout."
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"policy.model: {path} cannot be read: {error}. Was the folder copied whole?") from error


def _shapes(folder: Path) -> list[tuple[str, list[int]]] | None:
    """Of all weights, by name; None where they are pickles, which are not opened here."""
    files = _weight_files(folder)
    if files[0].suffix != ".safetensors":
        return None
    return [item for path in files for item in _shapes_in_header(path).items()]


def _count_parameters(folder: Path, shapes: list[tuple[str, list[int]]] | None, dtype: str) -> tuple[int, int]:
    """All of them, and how many of embeddings and output layer are stored: 1 where they are tied, else 2."""
    if shapes is not None:
        is_untied = any(name.endswith(_OUTPUT_LAYER) for name, _ in shapes)
        return sum(math.prod(shape) for _, shape in shapes), 2 if is_untied else 1
    # The size says nearly the same.
    return sum(path.stat().st_size for path in _weight_files(folder)) // _DTYPE_BYTES.get(dtype, 2), 2


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    else:
        files = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelError(f"policy.model {folder} has no weights; expected model.safetensors (or its numbered parts).")
    if missing := [path.name for path in files if not path.is_file()]:
        raise ModelError(
            f"policy.model {folder}: {index.name} names {missing[0]}, which is missing. Download it again."
        )
    return files


def _shapes_in_header(path: Path) -> dict[str, list[int]]:
    """The shapes in a safetensors header, by name: 8 bytes of length, then JSON from name to dtype, shape and place."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length < _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
            if path.stat().st_size < 8 + length + end:
                raise ValueError(f"it ends after {path.stat().st_size} of {8 + length + end} bytes")
    except (OSError, ValueError) as error:
        raise ModelError(f"policy.model: {path} cannot be read: {error}. Was it copied whole?") from error
    return {name: entry["shape"] for name, entry in header.items()}
