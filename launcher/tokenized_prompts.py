"""Prompts as the model reads them, in a process of its own, see `tokenizer_process`."""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towline.launcher.tokenizer_process import ask, serve

NUM_RENDERED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenized:
    """One dataset."""

    counts: list[int]
    """Tokens of each prompt, with what the chat template adds where it is wanted."""
    rendered: list[str]
    """The first prompts as the model reads them."""


def can_tokenize() -> bool:
    """A login node may lack transformers."""
    return importlib.util.find_spec("transformers") is not None


def tokenize(model: Path, prompts: Sequence[tuple[Sequence[str], bool]]) -> list[Tokenized]:
    """Count and render with the model's own tokenizer.

    Args:
        prompts: several datasets, each as its texts and whether they are wrapped with the chat template.

    Raises:
        ModelError: the folder's tokenizer cannot be loaded, or has no chat template when one is needed.
    """
    request = {"model": str(model), "datasets": [{"chat": chat, "texts": list(texts)} for texts, chat in prompts]}
    answer = ask("towline.launcher.tokenized_prompts", model, request)
    return [Tokenized(**dataset) for dataset in answer["datasets"]]


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    return {"datasets": [_tokenize(Path(request["model"]), **dataset) for dataset in request["datasets"]]}


def _tokenize(model: Path, *, chat: bool, texts: list[str]) -> dict[str, Any]:
    from towline.rollout.tokenizing import PromptTokenizer

    tokenizer = PromptTokenizer(model, chat=chat)
    rendered = [tokenizer.render(text) for text in texts[:NUM_RENDERED]]
    return {"counts": [len(tokenizer.encode(text)) for text in texts], "rendered": rendered}


if __name__ == "__main__":
    serve(_answer)
