"""`towline submit`: look at everything, make the run folder with a snapshot, hand one job to Slurm, and return."""

import dataclasses
import json
import shlex
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from towline.jobs.experiment import ExperimentConfig
from towline.jobs.load_experiment import recorded_experiment
from towline.jobs.slurm.attempts import AttemptBook
from towline.jobs.slurm.batch_step import BatchStep
from towline.jobs.slurm.profile import ClusterProfile, Option
from towline.jobs.slurm.text import time_limit_s
from towline.launcher.check import plan_lines
from towline.launcher.findings import Findings
from towline.launcher.het_executor import HetSlurmExecutor, HetSlurmJob
from towline.launcher.job_plan import job_plan_lines
from towline.launcher.on_cluster import OnCluster, components_of, placed, read_on_cluster
from towline.launcher.partition import partition_problems
from towline.launcher.preflight import raise_problems
from towline.launcher.run import make_run
from towline.launcher.several_runs import refuse_several, runs_of
from towline.launcher.snapshot import take_snapshot
from towline.launcher.start_estimate import start_estimate
from towline.storage.dataset_files import shown
from towline.storage.errors import SlurmError
from towline.storage.run_directory import RunDirectory, read_jsonl, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that is ready to be handed to Slurm."""

    run: RunDirectory
    experiment: ExperimentConfig
    profile: ClusterProfile
    executor: HetSlurmExecutor
    is_smoke: bool
    notes: tuple[str, ...]
    """Plan, warnings and cost, as a person reads them."""


def submit_experiment(
    path: Path | str, *, cluster: str | None = None, overrides: tuple[str, ...] = (), smoke: bool = False
) -> HetSlurmJob:
    """Submit an experiment from Python; returns at once. The job's `result()` waits for the run's end.

    Args:
        cluster: name or file of a profile; default: $TOWLINE_CLUSTER.
        overrides: "key.path=value", as with `-o`.
        smoke: both roles on one node, with the profile's `smoke` options.

    Raises:
        InputError: something is wrong that could be known; nothing was submitted.
        SlurmError: sbatch refused.
    """
    return submit_new(prepare(Path(path), cluster, overrides, smoke=smoke))


def submit_from_command(
    path: Path, cluster: str | None, overrides: tuple[str, ...], *, smoke: bool, dry_run: bool
) -> int:
    job = read_on_cluster(path, cluster, overrides, smoke=smoke)
    if dry_run:
        refuse_several(path, job.experiment, "a dry run shows one")
    found = _look(job)
    return max(
        _submitted(_prepare(dataclasses.replace(job, experiment=one), found), dry_run=dry_run)
        for one in runs_of(path, job.experiment)
    )


def _submitted(prepared: Prepared, *, dry_run: bool) -> int:
    for line in prepared.notes:
        print(line, file=sys.stderr if dry_run else sys.stdout)
    if dry_run:
        return show_script(prepared)
    return announce(prepared, submit_new(prepared))


def prepare(path: Path, cluster: str | None, overrides: tuple[str, ...], *, smoke: bool) -> Prepared:
    """Make the run folder with everything the job needs.

    Raises:
        InputError: all problems that can be known before the queue.
    """
    job = read_on_cluster(path, cluster, overrides, smoke=smoke)
    refuse_several(path, job.experiment, "this submits one")
    return _prepare(job, _look(job))


def _look(job: OnCluster) -> Findings:
    found = job.look()
    raise_problems(found.problems)
    return found


def _prepare(job: OnCluster, found: Findings) -> Prepared:
    plan = list(plan_lines(found.plan, job.experiment, on_cluster=True)) if found.plan is not None else []
    notes = (*plan, *(f"! {warning}" for warning in found.warnings), *job.job_lines())
    run = make_run(job.file, job.experiment)
    experiment = take_snapshot(run, recorded_experiment(run.config.read_text()))
    write_json(run.config, experiment.model_dump(mode="json"))
    write_json(run.cluster, job.profile.dump())
    return Prepared(run=run, experiment=experiment, profile=job.profile, is_smoke=job.is_smoke, notes=notes,
                    executor=_executor(run, job.profile, job.components))  # fmt: skip


def prepare_again(run: RunDirectory, experiment: ExperimentConfig) -> Prepared:
    """A further job for a run that was submitted before, with its profile and its snapshot."""
    profile = ClusterProfile.model_validate_json(run.cluster.read_text())
    # A row that the job itself wrote does not say it.
    smoke = next((bool(row["smoke"]) for row in reversed(read_jsonl(run.submissions)) if "smoke" in row), False)
    experiment = placed(experiment, profile, smoke=smoke)
    components = components_of(profile, experiment, smoke=smoke, exclude=AttemptBook(run).unreliable_nodes())
    raise_problems(partition_problems(profile, components))
    write_json(run.config, experiment.model_dump(mode="json"))
    return Prepared(
        run=run, experiment=experiment, profile=profile, is_smoke=smoke, executor=_executor(run, profile, components),
        notes=tuple(job_plan_lines(profile, experiment, components, smoke=smoke)),
    )  # fmt: skip


def submit_new(prepared: Prepared) -> HetSlurmJob:
    """As `submit_prepared`; a run that sbatch refuses leaves no folder, so that its name is free for the next try."""
    try:
        return submit_prepared(prepared)
    except SlurmError:
        shutil.rmtree(prepared.run.root)
        raise


def submit_prepared(prepared: Prepared) -> HetSlurmJob:
    before = prepared.run.read_state()
    # Before, as the job may start at once and say that it runs.
    prepared.run.write_state(status="queued")
    try:
        job = prepared.executor.submit(_batch_step(prepared))
    except BaseException:
        write_json(prepared.run.state, before)
        raise
    row = {
        "job": job.job_id,
        "submission": _submission(prepared.run),
        "submitted": time.time(),
        "components": dict(job.components),
        "smoke": prepared.is_smoke,
    }
    with prepared.run.submissions.open("a") as file:
        file.write(json.dumps(row) + "\n")
    return job


def show_script(prepared: Prepared) -> int:
    """What sbatch would get, on standard output; the rest is made and waits for it."""
    script = prepared.executor.prepare(_batch_step(prepared))
    print(script.read_text(), end="")
    print(
        f"Nothing was submitted. Run folder {shown(prepared.run.root)} is made; sbatch of this text starts it.",
        file=sys.stderr,
    )
    return 0


def announce(prepared: Prepared, job: HetSlurmJob) -> int:
    name = prepared.run.root.name
    print(f"Submitted {job.job_id}   run {name}   {start_estimate(job.job_id)}")
    root = "" if prepared.run.root.parent == Path("runs").resolve() else f" --root {shown(prepared.run.root.parent)}"
    print(f"next    towline status {name}{root}")
    return 0


def _executor(run: RunDirectory, profile: ClusterProfile, components: dict[str, dict[str, Option]]) -> HetSlurmExecutor:
    leader = next(iter(components))
    of_the_job: dict[str, Option] = {
        "job-name": run.root.name,
        "output": str(run.root / "logs" / "batch.log"),
        "error": False,
        "signal": signal_option(str(components[leader].get("time", ""))),
        "requeue": profile.continue_ == "requeue",
        "no-requeue": profile.continue_ != "requeue",
    }
    (run.root / "logs").mkdir(exist_ok=True)
    setup = [
        *(f"module load {shlex.quote(module)} || exit 1" for module in profile.software.modules),
        *profile.software.setup,
        f"export PYTHONPATH={shlex.quote(str(run.code))}${{PYTHONPATH:+:$PYTHONPATH}}",
    ]
    whole = {**components, leader: {**of_the_job, **components[leader]}}
    # A folder called towline where sbatch was typed must not be taken for this one. Python's own -P is unknown to those
    # before 3.11, which must come as far as saying what they are.
    python = f"env PYTHONSAFEPATH=1 {shlex.quote(sys.executable)}"
    return HetSlurmExecutor(run.slurm, whole, setup=setup, python=python)


def signal_option(time_limit: str) -> str:
    """A second warning, for when nothing was measured yet: a twentieth of the limit before it, at most five minutes."""
    limit_s = time_limit_s(time_limit) if time_limit else None
    lead_s = 300 if limit_s is None else min(300, max(10, limit_s // 20))
    return f"B:USR2@{lead_s}"


def _batch_step(prepared: Prepared) -> BatchStep:
    return BatchStep(str(prepared.run.root), _submission(prepared.run), prepared.is_smoke)


def _submission(run: RunDirectory) -> int:
    """Successors that the run submits itself belong to the same one."""
    rows = read_jsonl(run.submissions)
    return 1 + max((row["submission"] for row in rows), default=-1)
