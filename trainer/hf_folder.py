"""The policy's weights, gathered from all trainer ranks, and written as a folder that transformers reads."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from towline.storage.weight_stream import StreamHeader
from towline.trainer.deepspeed_engine import DeepSpeedEngine

MAX_SHARD = "5GB"
"""Of a weight file."""


def gather_weights(engine: DeepSpeedEngine, precision: str, on_progress: Callable[[], None]) -> dict[str, Tensor]:
    """All weights in main memory on rank 0, nothing elsewhere; bucket by bucket, since ZeRO-3 gathers on the device."""
    weights: dict[str, Tensor] = {}
    metas = engine.tensors()
    for bucket in StreamHeader(version=0, tensors=tuple(metas)).buckets():
        indices = [slot.index for slot in bucket.slots]
        with engine.gathered(indices) as tensors:
            if dist.get_rank() == 0:
                weights |= {
                    metas[index].name: tensor.to("cpu", getattr(torch, precision), copy=True)
                    for index, tensor in zip(indices, tensors, strict=True)
                }
        on_progress()
    return weights


def write_hf_folder(model: Any, weights: dict[str, Tensor], folder: Path, model_folder: Path) -> None:
    saved = set(model.state_dict())
    buffers = {name: buffer.cpu() for name, buffer in model.named_buffers() if name in saved}
    given = model_folder / "generation_config.json"
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    if model.can_generate():
        _save_with_generation(model, weights | buffers, folder, given)
    else:
        model.save_pretrained(folder, state_dict=weights | buffers, max_shard_size=MAX_SHARD)
        # A reward model reads its score before the padding: both must mean the same token by it.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.get_text_config().pad_token_id)
    tokenizer.save_pretrained(folder)


def _save_with_generation(model: Any, state: dict[str, Tensor], folder: Path, given: Path) -> None:
    """
    Args:
        given: generation settings, if there are any; copied as they are: transformers refuses to write some of those
            that it reads.
    """
    generation = model.generation_config
    try:
        if given.is_file():
            model.generation_config = GenerationConfig()
        model.save_pretrained(folder, state_dict=state, max_shard_size=MAX_SHARD)
    finally:
        model.generation_config = generation
    if given.is_file():
        shutil.copyfile(given, folder / given.name)
