"""A reward in a file of the user's: imported with the neighbours it needs, and what a fingerprint of it must cover."""

import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from towline.storage.errors import ConfigError

MAX_MESSAGE_CHARS = 350


@dataclass(frozen=True, slots=True)
class FileReward:
    function: Callable[..., Any]
    name: str
    """In its file."""
    sources: tuple[Path, ...]
    """The file, and the files of its folder that it imported while it was loaded."""

    def __call__(self, completion: str, gold: str) -> Any:
        return self.function(completion, gold)

    def digest(self) -> bytes:
        return self.name.encode() + _digest(self.sources)


@dataclass(frozen=True, slots=True)
class _Loaded:
    module: ModuleType
    sources: tuple[Path, ...]
    digest: bytes


_loaded: dict[Path, _Loaded] = {}
"""Two functions of one file share what it holds."""


def load_file_reward(use: str, folder: Path) -> FileReward:
    """Import `path/to/file.py:function`, relative to `folder`.

    Raises:
        ConfigError: there is no such file or function, it cannot be imported, or does not take (completion, gold).
    """
    file, _, name = use.rpartition(":")
    path = (folder / Path(file).expanduser()).resolve()
    if path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"rewards.use {use!r}: there is no Python file {path}; give a path relative to {folder}")
    known = _loaded.get(path)
    if known is None or known.digest != _digest(known.sources):
        known = _loaded[path] = _load(path)
    function = getattr(known.module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(known.module).items() if inspect.isfunction(value)]
        raise ConfigError(f"rewards.use {use!r}: {path} has no function {name!r}; {choices(name, functions)}")
    if not _takes_two(function):
        raise ConfigError(f"rewards.use {use!r}: {path}: {name} must take (completion, gold)")
    return FileReward(function, name, known.sources)


def _digest(sources: Sequence[Path]) -> bytes:
    """Of code, wherever the folder of the first file lies; a file that is gone differs from every file."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sources:
        content = path.read_bytes() if path.is_file() else b""
        digest.update(f"{path.relative_to(sources[0].parent)} {path.is_file()}\n".encode())
        digest.update(hashlib.blake2b(content).digest())
    return digest.digest()


def choices(wanted: str, known: Iterable[str]) -> str:
    known = sorted(known)
    nearest = difflib.get_close_matches(wanted, known, n=1)
    return (f"did you mean {nearest[0]!r}? " if nearest else "") + f"known: {', '.join(known) or 'none'}"


def describe(error: BaseException, files: Collection[Path]) -> str:
    """`Type: message at file:line`, the line being the innermost one in `files`, where their author can mend it."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} at {error.filename}:{error.lineno}"
    frames = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [(path, line) for path, line in frames if path in files]
    path, line = (own or frames)[-1]
    return f"{type(error).__name__}: {str(error)[:MAX_MESSAGE_CHARS]} at {path}:{line}"


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind("completion", "gold")
    except TypeError:
        return False
    except ValueError:  # a C function shows no signature
        return True
    return True


def _load(path: Path) -> _Loaded:
    name = f"towline_reward_{hashlib.blake2b(bytes(path), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses, pickle and the like look for it there
    try:
        with _own_folder_first(path.parent) as neighbours:
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ConfigError(
            f"{path} cannot be imported: {describe(error, [path])}; mend it, or install what it needs"
        ) from error
    sources = (path, *sorted(set(neighbours)))
    return _Loaded(module, sources, _digest(sources))


@contextmanager
def _own_folder_first(folder: Path) -> Iterator[list[Path]]:
    """Let a file import its neighbours, and forget them after: another file's `helpers` is another module.

    The list has the neighbours' files once the block has ended.
    """
    known, writes_bytecode = set(sys.modules), not sys.dont_write_bytecode
    neighbours: list[Path] = []
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # a neighbour may be younger than what the finder remembers of the folder
    sys.dont_write_bytecode = True  # the folder is the user's, and may be read-only
    try:
        yield neighbours
    finally:
        sys.dont_write_bytecode = not writes_bytecode
        if str(folder) in sys.path:
            sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            package = name.partition(".")[0]
            if file is not None and package != "towline" and _is_beside(Path(file), folder, package):
                neighbours.append(Path(file))
                del sys.modules[name]


def _is_beside(file: Path, folder: Path, package: str) -> bool:
    """Whether `package` was found in the folder itself, and not in a virtual environment somewhere below it."""
    return file.is_relative_to(folder) and file.relative_to(folder).parts[0] in (package, f"{package}.py")
