"""Which run a command means: a folder, a name under the run root, or the latest."""

import difflib
from pathlib import Path

from towline.storage.errors import RunFolderError
from towline.storage.run_directory import RunDirectory


def find_run(name: str | None, root: Path) -> RunDirectory:
    """Open a run by its folder or its name; without either, the one that started last."""
    runs = _runs(root)
    if name is None:
        if not runs:
            raise RunFolderError(f"{root} holds no run. Name one, or its root with --root.")
        return RunDirectory(max(runs, key=_started))
    for folder in (root / name, Path(name)):
        if RunDirectory(folder).config.is_file():
            return RunDirectory(folder)
    if Path(name).is_dir():
        return RunDirectory.open(Path(name))
    raise RunFolderError(f"{name} is no run in {root}.{_nearest(name, [run.name for run in runs])}")


def _runs(root: Path) -> list[Path]:
    folders = root.iterdir() if root.is_dir() else ()
    return [folder for folder in folders if RunDirectory(folder).config.is_file()]


def _started(folder: Path) -> float:
    """The experiment as the user wrote it is written once, when a run is made."""
    return RunDirectory(folder).source_config.stat().st_mtime


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f" Did you mean {near[0]}?"
    return f" There: {', '.join(sorted(names)[:10])}." if names else " It holds no run; name its folder, or use --root."
