"""Small real tokenizers with chat templates of every kind, written to a model folder."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>")
BOS, EOS, IM_START, IM_END, PAD = range(len(SPECIAL))
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A newline after every turn."""
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('only user and assistant turns are known') }}{% endif %}"
    "{% if m.role == 'user' %}[Q] {{ m.content }} [A]{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
"""Begins with BOS, ends turns with EOS, refuses system turns, and opens a turn with the end of the user's."""
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] | trim }}"
    "{% elif m.role == 'assistant' and '</think>' not in m.content %}<think></think>{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Leaves the thinking of earlier turns out, and writes an empty one into a last turn without."""
OPENS_THINKING = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>")
"""The generation prompt begins what no rendered turn begins with."""
ENDS_THE_TEXT = CHATML.replace("assistant\n{% endif %}", "assistant\n{% else %}{{ eos_token }}\n{% endif %}")
"""Writes an end of the text after the last turn, besides that of the turn."""
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""No end token at all."""


def byte_tokenizer(*, adds_bos: bool = False, adds_eos: bool = False) -> Tokenizer:
    """A token for each byte, and some that reach over where a prompt may end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), (".", "Ċ"), ("Ġ", "a"), ("=", "1")]
    pieces = [*SPECIAL, *letters, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos or adds_eos:
        single = f"{'<s> ' if adds_bos else ''}$A{' </s>' if adds_eos else ''}"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    return tokenizer


def prefixing_tokenizer() -> Tokenizer:
    """Puts a space before every text, as the first tokenizers of Llama do."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz0123456789=+?.:[]QA\n"]
    tokenizer = Tokenizer(
        models.BPE(vocab={piece: number for number, piece in enumerate([*SPECIAL, *letters])}, merges=[])
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, *, stops: Any = None, **settings: Any) -> Path:
    """
    Args:
        stops: `eos_token_id` of the generation settings; None: there are no such settings.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings).save_pretrained(folder)
    if stops is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder
