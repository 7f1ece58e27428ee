"""The models with random weights that tests of the trainer share."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from towline.trainer.attention import register_varlen_attention

VARLEN = register_varlen_attention()
SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
"""Of any model type: a configuration of a few thousand weights."""


def small_llama(attention=VARLEN, **options):
    """
    Args:
        options: of its configuration, before those of `SMALL`.
    """
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SMALL, **options}, attn_implementation=attention))


def write_scorer(folder, seed=0, **options):
    """A folder of a reward model with scores of about one unit, which pads with the token that ends texts; without a
    tokenizer.

    Args:
        options: as of `small_llama`.
    """
    torch.manual_seed(seed)
    settings = {**SMALL, "initializer_range": 0.2, "eos_token_id": 2, "pad_token_id": 2, "num_labels": 1} | options
    LlamaForSequenceClassification(LlamaConfig(**settings)).save_pretrained(folder)
    return folder


def sharded_llama(seed, *, tied=True):
    """Its embeddings and MLP are large enough for ZeRO-3 to shard them always; it keeps the rest whole after use."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=1600, hidden_size=64, intermediate_size=1600, num_hidden_layers=2, num_attention_heads=2,
        head_dim=32, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=tied,
        initializer_range=0.06,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
