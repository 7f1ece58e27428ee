"""Which run a command means: a folder, a name under the run roots, a Slurm job, or the latest."""

import difflib
import os
from pathlib import Path

from towline.jobs.slurm.text import parse_job_id
from towline.launcher.profile_file import load_profile
from towline.storage.errors import RunFolderError, SlurmError
from towline.storage.run_directory import RunDirectory, read_jsonl


def default_roots() -> tuple[Path, ...]:
    """./runs and, when $TOWLINE_CLUSTER names a profile, where that cluster's runs are made."""
    if not os.environ.get("TOWLINE_CLUSTER"):
        return (Path("runs"),)
    folder = Path(os.path.expanduser(os.path.expandvars(load_profile(None).folders.runs)))
    return (Path("runs"),) if folder.resolve() == Path("runs").resolve() else (Path("runs"), folder)


def find_run(name: str | None, *roots: Path) -> RunDirectory:
    """Open a run by its folder, its name or one of its Slurm jobs; without any, the one that started last."""
    runs = [run for root in roots for run in _runs(root)]
    where = " and ".join(str(root) for root in roots)
    if name is None:
        if not runs:
            raise RunFolderError(f"{where} holds no run. Name one, or its root with --root.")
        return RunDirectory(max(runs, key=_started))
    for folder in (*(root / name for root in roots), Path(name)):
        if RunDirectory(folder).config.is_file():
            return RunDirectory(folder)
    if Path(name).is_dir():
        return RunDirectory.open(Path(name))
    if (job := _job_of(name)) is not None:
        return _run_of_job(job, name, runs, where)
    raise RunFolderError(f"{name} is no run in {where}.{_nearest(name, [run.name for run in runs])}")


def _runs(root: Path) -> list[Path]:
    folders = root.iterdir() if root.is_dir() else ()
    return [folder for folder in folders if RunDirectory(folder).config.is_file()]


def _started(folder: Path) -> float:
    """The experiment as the user wrote it is written once, when a run is made."""
    return RunDirectory(folder).source_config.stat().st_mtime


def _job_of(text: str) -> str | None:
    try:
        return parse_job_id(text).job
    except SlurmError:
        return None


def _run_of_job(job: str, text: str, runs: list[Path], where: str) -> RunDirectory:
    """A cluster may give its ids out again after years: the run that had it last is meant."""
    submitted = {
        run: max(times)
        for run in runs
        if (times := [row["submitted"] for row in read_jsonl(RunDirectory(run).submissions) if str(row["job"]) == job])
    }
    if not submitted:
        raise RunFolderError(
            f"{text} is neither a run nor a Slurm job of a run in {where}. Name the run, or its root with --root."
        )
    return RunDirectory(max(submitted, key=lambda run: submitted[run]))


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f" Did you mean {near[0]}?"
    return f" There: {', '.join(sorted(names)[:10])}." if names else " It holds no run; name its folder, or use --root."
