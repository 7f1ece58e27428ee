"""A process of its own for the model's tokenizer: the supervisor must not import what transformers does.

The module that is asked runs as a program, which reads a request as JSON from standard input and answers as JSON on
standard output.
"""

import importlib.machinery
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from towline.storage.errors import ConfigError, DataError, InputError, ModelError

_HIDDEN = ("torch", "tensorflow", "jax", "flax")
_ERRORS: dict[str, type[InputError]] = {error.__name__: error for error in (ConfigError, DataError, ModelError)}


def ask(module: str, model: Path, request: dict[str, Any]) -> dict[str, Any]:
    """
    Args:
        module: calls `serve` when it is run.
        model: the model folder, for messages.

    Raises:
        InputError: as the module does; ModelError where it dies.
    """
    done = subprocess.run(
        [sys.executable, "-P", "-m", module],
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
        raise _ERRORS[answer["error"]](answer["message"])
    return answer


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer the one request of this process, in which heavy packages look as if they were not installed."""
    usual = importlib.machinery.PathFinder
    sys.meta_path[:] = [_WithoutTorch if finder is usual else finder for finder in sys.meta_path]
    request: dict[str, Any] = json.load(sys.stdin)
    try:
        found = answer(request)
    except (ConfigError, DataError, ModelError) as error:
        found = {"error": type(error).__name__, "message": str(error)}
    sys.stdout.write(json.dumps(found))


class _WithoutTorch(importlib.machinery.PathFinder):
    """A tokenizer needs none of them."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        return None if fullname.partition(".")[0] in _HIDDEN else super().find_spec(fullname, path, target)
