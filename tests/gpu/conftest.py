"""Everything here needs one NVIDIA GPU and finishes in a few minutes on it:

    pytest -m gpu tests/gpu

What one GPU cannot show: weights over NCCL, which takes a GPU for each member of a group, and two trainer ranks.
"""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TINY = {
    "vocab_size": 1600, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
    "initializer_range": 0.06, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _needs_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def save_llama():
    """Write a folder with a tiny float32 Llama, and return it."""

    def save(folder: Path, *, seed: int, tied: bool) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=tied)).eval()
        model.save_pretrained(folder)
        return model

    return save


@pytest.fixture(scope="session", params=[True, False], ids=["tied", "untied"])
def model_folder(request, save_llama, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder, seed=0, tied=request.param)
    return folder
