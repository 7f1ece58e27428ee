"""The reward of an experiment: several functions, each part kept apart, and their weighted sum.

A reward function takes `(completion, gold)` and returns a number or a `Verdict`. It may be the user's own file, so
whatever it raises or returns becomes a failed part with a reason: NaN in the ledger, never a silent 0.
"""

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from towline.rollout.rewards.verdict import Verdict
from towline.storage.errors import ConfigError
from towline.storage.records import Score, ScoreStatus

Reward = Callable[[str, str], Verdict | float]

BUILT_IN = {
    "exact_match": "towline.rollout.rewards.exact_match:grade",
    "format": "towline.rollout.rewards.format:grade",
    "math_answer": "towline.rollout.rewards.math_answer:grade",
}
MAX_DETAIL_CHARS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPart:
    name: str
    weight: float
    function: Reward


def score(parts: Sequence[RewardPart], completion: str, gold: str) -> Score:
    """Ask every part, also after one has failed; the total is NaN unless all of them are OK."""
    verdicts = {part.name: judge(part.function, completion, gold) for part in parts}
    values = {name: math.nan if verdict.value is None else verdict.value for name, verdict in verdicts.items()}
    statuses = {verdict.status for verdict in verdicts.values()}
    return Score(
        parts=values,
        part_status={name: verdict.status for name, verdict in verdicts.items()},
        part_seconds={name: verdict.seconds for name, verdict in verdicts.items()},
        total=sum(part.weight * values[part.name] for part in parts),
        status=next((s for s in (ScoreStatus.FAILED, ScoreStatus.TIMEOUT) if s in statuses), ScoreStatus.OK),
        seconds=sum(verdict.seconds for verdict in verdicts.values()),
        detail="; ".join(f"{name}: {verdict.detail}" for name, verdict in verdicts.items() if verdict.detail),
    )


def judge(function: Reward, completion: str, gold: str) -> Verdict:
    """Call one reward function; nothing it raises gets past here, except what ends the process."""
    started = time.perf_counter()
    try:
        verdict = _as_verdict(function(completion, gold))
    except (Exception, SystemExit) as error:
        verdict = _failed(_describe(error, _source_file(function)))
    return replace(verdict, seconds=time.perf_counter() - started)


def _as_verdict(answer: object) -> Verdict:
    if isinstance(answer, Verdict):
        if answer.status != ScoreStatus.OK:
            return replace(answer, value=None, detail=answer.detail[:MAX_DETAIL_CHARS])
        return replace(_as_verdict(answer.value), detail=answer.detail[:MAX_DETAIL_CHARS])
    if isinstance(answer, Real) and math.isfinite(value := float(answer)):
        return Verdict(value=value)
    return _failed(f"returned {answer!r} ({type(answer).__name__}); return a finite number or a Verdict")


def _failed(detail: str) -> Verdict:
    return Verdict(value=None, status=ScoreStatus.FAILED, detail=detail[:MAX_DETAIL_CHARS])


def load_reward(use: str, folder: Path) -> Reward:
    """Find a reward by its built-in name, or as `path/to/file.py:function` relative to `folder`."""
    file, colon, name = use.rpartition(":")
    if not colon:
        if use not in BUILT_IN:
            raise ConfigError(
                f"rewards.use {use!r} is not a built-in reward; {_choices(use, BUILT_IN)}, or FILE.py:FUNCTION"
            )
        module, _, name = BUILT_IN[use].partition(":")
        return getattr(importlib.import_module(module), name)
    path = (folder / Path(file).expanduser()).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"rewards.use {use!r}: there is no Python file {path}; give a path relative to {folder}")
    module = _import_file(path)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"rewards.use {use!r}: {path} has no function {name!r}; {_choices(name, known)}")
    if not _takes_two(function):
        raise ConfigError(f"rewards.use {use!r}: {path}: {name} must take (completion, gold)")
    return cast(Reward, function)


def _choices(wanted: str, known: Iterable[str]) -> str:
    known = sorted(known)
    nearest = difflib.get_close_matches(wanted, known, n=1)
    return (f"did you mean {nearest[0]!r}? " if nearest else "") + f"known: {', '.join(known) or 'none'}"


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind("completion", "gold")
    except TypeError:
        return False
    except ValueError:  # a C function shows no signature
        return True
    return True


def _import_file(path: Path) -> ModuleType:
    """Import by path under a name made of the content, so that a changed file is never served from memory."""
    try:
        content = path.read_bytes()
        name = f"towline_reward_{hashlib.blake2b(bytes(path) + content, digest_size=8).hexdigest()}"
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None, path
        assert spec.loader is not None, path
        module = importlib.util.module_from_spec(spec)
        with _own_folder_first(path.parent):
            sys.modules[name] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path} cannot be imported: {_describe(error, path)}; mend it, or install what it needs"
        ) from error
    return module


@contextmanager
def _own_folder_first(folder: Path) -> Iterator[None]:
    """Let a file import its neighbours, and forget them after: another file's `helpers` is another module."""
    known, writes_bytecode = set(sys.modules), not sys.dont_write_bytecode
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True  # the folder is the user's, and may be read-only
    try:
        yield
    finally:
        sys.dont_write_bytecode = not writes_bytecode
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            package = name.partition(".")[0]
            if file is not None and package != "towline" and _is_beside(Path(file), folder, package):
                del sys.modules[name]


def _is_beside(file: Path, folder: Path, package: str) -> bool:
    """Whether `package` was found in the folder itself, and not in a virtual environment somewhere below it."""
    return file.is_relative_to(folder) and file.relative_to(folder).parts[0] in (package, f"{package}.py")


def code_hash(parts: Sequence[RewardPart]) -> str:
    """Fingerprint of the code that gives the rewards: the file of each function; for ours, every file beside it."""
    digest = hashlib.blake2b(digest_size=16)
    ours = Path(__file__).resolve().parent
    for part in parts:
        file = _source_file(part.function)
        name = getattr(part.function, "__qualname__", type(part.function).__qualname__)
        digest.update(f"{part.name} {file.name if file else ''}:{name}\n".encode())
        if file is None:
            continue
        for source in sorted(ours.glob("*.py")) if file.parent == ours else [file]:
            digest.update(hashlib.blake2b(source.read_bytes()).digest())
    return digest.hexdigest()


def _source_file(function: object) -> Path | None:
    """The file a function is written in; for an object with `__call__`, that of its class."""
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    file = Path(code.co_filename).resolve() if code is not None else None
    return file if file is not None and file.is_file() else None


def _describe(error: BaseException, file: Path | None) -> str:
    """`Type: message at file:line`, the line being the innermost one in `file`, where its author can mend it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} at {error.filename}:{error.lineno}"
    frames = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(path, line) for path, line in frames if path == file]
    path, line = (own or frames)[-1]
    return f"{type(error).__name__}: {str(error)[: MAX_DETAIL_CHARS - 150]} at {path}:{line}"
