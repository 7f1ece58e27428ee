"""A submitit executor for one heterogeneous Slurm job.

    executor = HetSlurmExecutor(
        "runs/one/slurm",
        {
            "trainer": {"partition": "gpu", "nodes": 2, "gpus-per-node": 4, "exclusive": True, "time": "24:00:00"},
            "rollout": {"partition": "inference", "nodes": 4, "gpus-per-node": 4, "time": "24:00:00"},
        },
        setup=["module load cuda"],
    )
    job = executor.submit(supervise)                       # one callable, in the batch step on the first node
    jobs = executor.submit_components({"trainer": train, "rollout": serve})   # or one in each rank of each component
    jobs["rollout"].results()

Callable, checkpoint, requeue and result are submitit's. What stock submitit 1.5.4 does not have: a job with components,
whose accounting rows are `12+0` and `12+1` while sbatch says `12`.
"""

import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from submitit.core import core
from submitit.core.utils import DelayedSubmission
from submitit.slurm.slurm import SlurmExecutor

from towline.jobs.slurm.command import slurm
from towline.jobs.slurm.component_steps import CheckpointableSteps, Component, ComponentSteps
from towline.jobs.slurm.submission import Submission, first_free_name, give_to_job
from towline.jobs.slurm.text import outside_a_job, submitted_job_id, time_limit_s
from towline.launcher.het_job import ComponentDied, HetSlurmJob
from towline.launcher.het_script import (
    Option,
    Options,
    check_components,
    check_folder,
    job_defaults,
    num_tasks,
    script_text,
)
from towline.storage.errors import InputError
from towline.storage.publish import replace_whole

__all__ = ["ComponentDied", "HetSlurmExecutor", "HetSlurmJob", "NoCheckpointWarning"]

ENTRY = "towline.jobs.slurm.batch_entry"


class NoCheckpointWarning(UserWarning):
    """A job of this callable is lost at its time limit."""


class HetSlurmExecutor(SlurmExecutor):
    """Submits jobs of these components, the first being the leader, in whose batch step the callable runs.

    Args:
        folder: for scripts, pickles, results and logs; every node must see it. May hold several jobs.
        components: sbatch's long options by component. True is a bare flag, False leaves an option out. With one
            component it is an ordinary job. Options of the job as a whole are the first component's.
        setup: shell lines before Python starts.
        python: shell words that start Python on the nodes, such as a container's; else the one that runs this.
        max_num_timeout: how often a callable with `checkpoint` is requeued at its time limit. Preemptions are not
            counted: a signal well before the limit is taken for one (stock submitit counts any signal in jobs of up to
            ten minutes, and in the last fifth of longer ones). Without the leader's option `time` every signal counts.

    Raises:
        InputError: a folder or an option that Slurm would not take.
    """

    job_class = HetSlurmJob

    def __init__(
        self,
        folder: Path | str,
        components: Mapping[str, Options],
        *,
        setup: Sequence[str] = (),
        python: str | None = None,
        max_num_timeout: int = 3,
    ) -> None:
        # Not SlurmExecutor's own, which refuses to be made where srun is missing: a script can be shown anywhere.
        core.PicklingExecutor.__init__(self, folder, max_num_timeout=max_num_timeout)
        check_folder(self.folder)
        check_components(components)
        self.components = {name: dict(options) for name, options in components.items()}
        self.setup = list(setup)
        self.python = shlex.quote(sys.executable) if python is None else python

    @classmethod
    def name(cls) -> str:
        return "hetslurm"

    def script_text(self, name: str = "callable") -> str:
        """Exactly what sbatch gets.

        Args:
            name: of the submission; later ones in the same folder are `callable-2`, ...
        """
        command = self._entry(name)
        return script_text(self.components, folder=self.folder, setup=self.setup, command=command)

    def submit(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> HetSlurmJob:
        """Run `fn(*args, **kwargs)` once, in the batch step; `srun --het-group=1 ...` reaches the other components.

        Warns NoCheckpointWarning if `fn` has no `checkpoint(*args, **kwargs)` that returns a DelayedSubmission.

        Raises:
            SlurmError: sbatch refused, or is not there.
        """
        _warn_without_checkpoint({"": fn})
        return self._submit(first_free_name(self.folder), DelayedSubmission(fn, *args, **kwargs))

    def prepare(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Path:
        """Write everything that `submit` would hand to Slurm, and hand in nothing; `sbatch` of the path is that job."""
        name = first_free_name(self.folder)
        return self._write(name, DelayedSubmission(fn, *args, **kwargs))

    def submit_components(
        self, functions: Mapping[str, Callable[[], Any] | DelayedSubmission]
    ) -> dict[str, HetSlurmJob]:
        """Run each component's function in all of its ranks, a step of its own each, with a result for every rank.

        The first rank that fails ends the job. On a signal rank 0 of each component calls its `checkpoint`.

        Raises:
            InputError: not one function for each component.
            SlurmError: sbatch refused, or is not there.
        """
        if set(functions) != set(self.components):
            expected, found = ", ".join(self.components), ", ".join(functions) or "none"
            raise InputError(f"submit_components needs one function for each of {expected}; found {found}")
        ordered = {name: _delayed(functions[name]) for name in self.components}
        _warn_without_checkpoint({name: delayed.function for name, delayed in ordered.items()})
        name = first_free_name(self.folder)
        for number, delayed in enumerate(ordered.values()):
            self._dump(delayed, f"{name}+{number}")
        tasks = {name: num_tasks(options, name) for name, options in self.components.items()}
        steps_class = CheckpointableSteps if any(map(_has_checkpoint, ordered.values())) else ComponentSteps
        steps = steps_class(
            components=[
                Component(name=name, num_tasks=tasks[name], cpus_per_task=_text(options.get("cpus-per-task")))
                for name, options in self.components.items()
            ],
            command=self._entry(name, always_named=True),
            folder=self.folder,
        )
        whole = self._submit(name, DelayedSubmission(steps))
        return {
            name: HetSlurmJob(self.folder, id, range(tasks[name]), components=[name], batch_logs=whole.batch_logs)
            for name, id in whole.components.items()
        }

    def map_array(self, fn: Callable[..., Any], *iterable: Any) -> NoReturn:
        _refuse_arrays()

    def submit_array(self, fns: Sequence[Callable[[], Any]]) -> NoReturn:
        _refuse_arrays()

    def batch(self, allow_implicit_submissions: bool = False) -> NoReturn:
        _refuse_arrays()

    def update_parameters(self, **kwargs: Any) -> NoReturn:
        raise InputError("options are given by component when the executor is made: HetSlurmExecutor(folder, {...})")

    def _write(self, name: str, delayed: DelayedSubmission) -> Path:
        """Everything the job reads, on disk before sbatch is asked, for it may start at once; return the script."""
        leader = self._leader
        Submission.of(time=_text(leader.get("time")), signal=_text(leader["signal"])).write(self._path(name, "json"))
        self._dump(delayed, name)
        script = self._path(name, "sh")
        with replace_whole(script) as temporary:
            temporary.write_text(self.script_text(name))
        return script

    def _submit(self, name: str, delayed: DelayedSubmission) -> HetSlurmJob:
        script = self._write(name, delayed)
        self._throttle()
        self._last_job_submitted = time.time()
        job_id = submitted_job_id(slurm(["sbatch", str(script)], environment=outside_a_job(os.environ)))
        logs = [Path(log.replace("%j", job_id)) for name in ("error", "output") if (log := _text(self._leader[name]))]
        job = HetSlurmJob(self.folder, job_id, components=list(self.components), batch_logs=logs)
        give_to_job(self._path(name, "pkl"), job.paths.submitted_pickle)
        return job

    def _dump(self, delayed: DelayedSubmission, name: str) -> None:
        # The limit in minutes is only kept for submitit's sake: our count of time-outs reads the option itself.
        limit_s = time_limit_s(self._leader["time"]) if "time" in self._leader else None
        delayed.set_timeout((limit_s or 0) // 60, self.max_num_timeout)
        with replace_whole(self._path(name, "pkl")) as temporary:
            delayed.dump(temporary)

    def _entry(self, name: str, *, always_named: bool = False) -> str:
        words = [str(self.folder)] if name == "callable" and not always_named else [str(self.folder), name]
        return f"{self.python} -u -m {ENTRY} {shlex.join(words)}"

    def _path(self, name: str, ending: str) -> Path:
        return self.folder / f"{name}.{ending}"

    @property
    def _leader(self) -> dict[str, Option]:
        return job_defaults(self.folder) | next(iter(self.components.values()))


def _delayed(function: Callable[[], Any] | DelayedSubmission) -> DelayedSubmission:
    return function if isinstance(function, DelayedSubmission) else DelayedSubmission(function)


def _has_checkpoint(delayed: DelayedSubmission) -> bool:
    return hasattr(delayed.function, "checkpoint")


def _warn_without_checkpoint(functions: Mapping[str, Callable[..., Any]]) -> None:
    for component, function in functions.items():
        if not hasattr(function, "checkpoint"):
            whose = f" of component {component!r}" if component else ""
            warnings.warn(
                f"{getattr(function, '__qualname__', function)}{whose} has no method `checkpoint`: when its time is "
                "over the job ends and is not requeued, and a job that is preempted starts from the beginning. Give "
                "it `checkpoint(*args, **kwargs)`, which returns submitit's DelayedSubmission to go on with.",
                NoCheckpointWarning,
                stacklevel=3,
            )


def _refuse_arrays() -> NoReturn:
    raise InputError("Slurm refuses arrays of heterogeneous jobs. Submit them one by one.")


def _text(value: Option | None) -> str | None:
    """None of an option that is left out."""
    return None if value is None or value is False else str(value)
