"""Tokens of prompts, counted in a process of its own: transformers would bring torch into the one that supervises.

As a program it reads a request as JSON from standard input and answers as JSON on standard output.
"""

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from towline.storage.errors import ModelError

_HIDDEN = ("torch", "tensorflow", "jax", "flax")


def can_count() -> bool:
    """A login node may lack transformers."""
    return importlib.util.find_spec("transformers") is not None


def count_tokens(model: Path, prompts: Sequence[tuple[Sequence[str], bool]]) -> list[list[int]]:
    """Tokens of each prompt, with what the chat template adds where it is wanted.

    Args:
        prompts: several datasets, each as its texts and whether they are wrapped with the chat template.

    Raises:
        ModelError: the folder's tokenizer cannot be loaded, or has no chat template when one is needed.
    """
    request = {"model": str(model), "datasets": [{"chat": chat, "texts": list(texts)} for texts, chat in prompts]}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "towline.launcher.token_counts"],
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
    return answer["counts"]


class _WithoutTorch(importlib.machinery.PathFinder):
    """Makes heavy packages look as if they were not installed: a tokenizer needs none of them."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        return None if fullname.partition(".")[0] in _HIDDEN else super().find_spec(fullname, path, target)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"counts": [_count(Path(request["model"]), **dataset) for dataset in request["datasets"]]}
    except ModelError as error:
        return {"error": str(error)}


def _count(model: Path, *, chat: bool, texts: list[str]) -> list[int]:
    from towline.rollout.tokenizing import PromptTokenizer

    tokenizer = PromptTokenizer(model, chat=chat)
    return [len(tokenizer.encode(text)) for text in texts]


def _serve() -> None:
    usual = importlib.machinery.PathFinder
    sys.meta_path[:] = [_WithoutTorch if finder is usual else finder for finder in sys.meta_path]
    answer = _answer(json.load(sys.stdin))
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    _serve()
