"""Load a transformers model of any kind for training: its attention, its device, the proof that it can be packed."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.utils.import_utils import is_flash_attn_2_available

from towline.storage.errors import ModelError
from towline.trainer.attention import NAME, caps_scores, packed_arguments, register_varlen_attention
from towline.trainer.isolation import assert_isolated, assert_rows_isolated
from towline.trainer.packing_step import Packing


def training_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def usual_attention(packing: Packing, precision: str) -> str | None:
    """transformers' name of the attention that this packing is best done with; None for its own choice.

    For packed sequences flash_attention_2 where it is installed and can be used (bfloat16 on a GPU), which computes a
    prompt again for each completion, and elsewhere `attention.NAME`, which does not.
    """
    if packing == "buckets":
        return None
    can_flash = training_device().type == "cuda" and precision == "bfloat16" and is_flash_attn_2_available()
    return "flash_attention_2" if can_flash else NAME


def from_folder(auto_class: Any, kind: str, folder: Path, precision: str, attention: str | None, **options: Any) -> Any:
    """What `auto_class.from_pretrained` makes of the folder with these options, in main memory.

    Args:
        kind: of model, for messages.
        attention: by default transformers' own choice, or "eager" for a model that caps its attention scores.

    Raises:
        ModelError: the folder holds no such model, or one that cannot have this attention.
    """
    register_varlen_attention()
    try:
        if attention is None and caps_scores(AutoConfig.from_pretrained(folder, local_files_only=True)):
            attention = "eager"
        return auto_class.from_pretrained(
            folder, dtype=getattr(torch, precision), attn_implementation=attention, local_files_only=True, **options
        )
    except KeyError as error:
        if attention is None or attention not in error.args:
            raise
        raise ModelError(
            f"policy.model {folder} has an attention of its own and cannot be loaded with {attention}, which packing "
            'needs: set trainer.packing = "buckets", or take another model'
        ) from error
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"policy.model {folder} cannot be loaded as {kind}: {error}") from error


def assert_apart(model: Any, packing: Packing) -> None:
    """Prove that sequences of a micro-batch do not see each other, see `isolation`.

    Raises:
        ModelError: they do.
    """
    if packing == "packed":
        assert_isolated(model)
    else:
        assert_rows_isolated(model)


def arguments_of_text(token_ids_T: Tensor, packing: Packing) -> dict[str, Any]:
    """Of a model that was loaded for this packing: one text alone."""
    if packing == "packed":
        return packed_arguments([token_ids_T])
    return {"input_ids": token_ids_T[None], "use_cache": False}


def checkpoint_gradients(model: Any) -> None:
    """Compute the layers' activations again in backward instead of keeping them."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
