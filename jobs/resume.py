"""Make a run's folder such that the next attempt can go on from it. Imports no torch."""

import contextlib
import os
from collections.abc import Callable

import psutil

from towline.jobs.experiment import ExperimentConfig, RolloutExperiment
from towline.jobs.first_fault import recorded_faults
from towline.jobs.work import Workload, evaluation_work, training_work
from towline.storage.checkpoints import newest_step
from towline.storage.errors import FailedScoresError
from towline.storage.ledger import read_scores, scores_path, sealed_chunks
from towline.storage.metrics import cut_rows
from towline.storage.records import ScoreStatus
from towline.storage.run_directory import RunDirectory
from towline.storage.set_aside import repair, set_aside

_END_WITHIN_S = 10.0


def prepare_resume(
    run: RunDirectory, attempt: int, experiment: ExperimentConfig, tell: Callable[[str], None]
) -> int | None:
    """Clear away what the attempts before left half-done; return the checkpoint to go on from, None without one.

    Nothing sealed is lost: shards that are damaged or were sampled otherwise are set aside, and rows of steps that
    will be trained again are kept in the logs.
    """
    if attempt == 0:
        return None
    if ended := end_leftover_processes(run):
        tell(f"{ended} processes that an earlier attempt left behind were ended")
    checkpoint = newest_step(run.checkpoints)
    first_step = checkpoint or 0
    for work in _generated(experiment, run):
        for one in repair(run, from_step=first_step, attempt=attempt, sampling_hash=work.sampling_hash,
                          folder=work.folder):  # fmt: skip
            tell(f"{one.path} is set aside: {one.reason}")
    if _ended_for_failed_scores(run, attempt - 1) and (num_again := score_again(run, first_step, attempt)):
        tell(f"step {first_step} is scored again: {num_again} of its chunks had completions without a score")
    superseded = run.logs(attempt) / "superseded.jsonl"
    num_again = cut_rows(run.metrics, lambda row: row["step"] < first_step, superseded)
    cut_rows(run.evaluations, lambda row: row["version"] <= first_step, superseded)
    if checkpoint is None:
        on_what = ", on the shards that are there" if experiment.num_engines else ""
        tell(f"no checkpoint was kept: training begins again with step 0{on_what}")
    else:
        again = f"; steps trained again after it: {num_again}" if num_again else ""
        tell(f"going on from checkpoint {checkpoint}{again}")
    return checkpoint


def _generated(experiment: ExperimentConfig, run: RunDirectory) -> list[Workload]:
    """What the run's engines write; nothing where there are none."""
    if not isinstance(experiment, RolloutExperiment):
        return []
    works = (training_work(experiment, run), evaluation_work(experiment, run))
    return [work for work in works if work is not None]


def _ended_for_failed_scores(run: RunDirectory, attempt: int) -> bool:
    return any(fault.what.startswith(FailedScoresError.__name__) for fault in recorded_faults(run, attempt))


def score_again(run: RunDirectory, step: int, attempt: int) -> int:
    """Set the scores of a step aside where some failed: what was in the way, a limit or a node, may be mended."""
    failed = [
        scores_path(path)
        for path in sealed_chunks(run.rollouts, step)
        if scores_path(path).is_file() and any(score.status is not ScoreStatus.OK for score in read_scores(path).scores)
    ]
    for path in failed:
        set_aside(run, path, "more failed than scoring.max_failed allows, and the run ended", attempt)
    return len(failed)


def end_leftover_processes(run: RunDirectory) -> int:
    """Kill processes of this run on this host whose supervisor is gone; return how many. Call with the run's lock."""
    left = [process for process in psutil.process_iter() if _is_of(process, run)]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_END_WITHIN_S)
    return len(left)


def _is_of(process: psutil.Process, run: RunDirectory) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get("TOWLINE_RUN") == str(run.root.resolve())
    except (psutil.AccessDenied, psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
