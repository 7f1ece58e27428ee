"""Prompts as the model reads them, in a process of its own: the supervisor must not import what transformers does.

As a program it reads a request as JSON from standard input and answers as JSON on standard output.
"""

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from towline.storage.errors import ModelError

NUM_RENDERED = 3
_HIDDEN = ("torch", "tensorflow", "jax", "flax")


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
    done = subprocess.run(
        [sys.executable, "-P", "-m", "towline.launcher.tokenized_prompts"],
        input=json.dumps(request),
        env=os.environ | {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ModelError(f"policy.model {model}: its tokenizer cannot be used: {last}")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise ModelError(answer["error"])
    return [Tokenized(**dataset) for dataset in answer["datasets"]]


class _WithoutTorch(importlib.machinery.PathFinder):
    """Makes heavy packages look as if they were not installed: a tokenizer needs none of them."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        return None if fullname.partition(".")[0] in _HIDDEN else super().find_spec(fullname, path, target)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"datasets": [_tokenize(Path(request["model"]), **dataset) for dataset in request["datasets"]]}
    except ModelError as error:
        return {"error": str(error)}


def _tokenize(model: Path, *, chat: bool, texts: list[str]) -> dict[str, Any]:
    from towline.rollout.tokenizing import PromptTokenizer

    tokenizer = PromptTokenizer(model, chat=chat)
    rendered = [tokenizer.render(text) for text in texts[:NUM_RENDERED]]
    return {"counts": [len(tokenizer.encode(text)) for text in texts], "rendered": rendered}


def _serve() -> None:
    usual = importlib.machinery.PathFinder
    sys.meta_path[:] = [_WithoutTorch if finder is usual else finder for finder in sys.meta_path]
    answer = _answer(json.load(sys.stdin))
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _serve()
