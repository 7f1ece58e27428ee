"""What every process of a run does around its own work: find the run, log, beat, and leave its fault on disk."""

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from towline.jobs.control_store import ControlStore
from towline.jobs.experiment import ExperimentConfig, RolloutExperiment
from towline.jobs.heartbeat import Heartbeat
from towline.jobs.load_experiment import recorded_experiment
from towline.storage.errors import StoreError
from towline.storage.run_directory import RunDirectory, write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """A process's place in its run."""

    process: str
    """Such as "rollout.1"; names its log, its heartbeat and its fault."""
    life: int
    """How often this process was started before in this attempt."""
    run: RunDirectory
    attempt: int
    experiment: ExperimentConfig
    store: ControlStore
    heartbeat: Heartbeat

    @property
    def circle(self) -> RolloutExperiment:
        """For what only a run with engines has."""
        assert isinstance(self.experiment, RolloutExperiment), self.experiment.objective
        return self.experiment

    @property
    def is_stopping(self) -> bool:
        return self.store.get("stop") is not None

    @property
    def is_finished(self) -> bool:
        """The trainer has done its last step: nothing more will be asked for."""
        return self.store.get("finished") is not None


def run_role(process: str, body: Callable[[Role], None]) -> None:
    """Run `body` as a process of a run, and end the process with its exit code.

    An exception is written to the run folder with its traceback before the process ends: the supervisor shows the
    first of them, not the last.
    """
    run, attempt = RunDirectory(Path(os.environ["TOWLINE_RUN"])), int(os.environ["TOWLINE_ATTEMPT"])
    life = int(os.environ.get("TOWLINE_LIFE", "0"))
    log = run.log(attempt, process)
    _write_to(log)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    code = 0
    store: ControlStore | None = None
    try:
        key = bytes.fromhex(run.key.read_text())
        address = os.environ["TOWLINE_STORE"]
        store = ControlStore(address, key, attempt)
        role = Role(
            process=process,
            life=life,
            run=run,
            attempt=attempt,
            experiment=_experiment(run),
            store=store,
            heartbeat=Heartbeat(address, key, attempt, process, life),
        )
        if "TOWLINE_JOB" in os.environ:
            # A preemption's asks for a checkpoint. On one machine it comes from the supervisor, and means the end.
            role.heartbeat.note_signals(signal.SIGTERM, signal.SIGUSR2)
        body(role)
    except BaseException as error:  # the process's own boundary: whatever ended it is recorded
        _record_fault(run, attempt, process, life, log, error, store)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # Without this a dead peer's collectives can keep the interpreter from ending.
    os._exit(code)


def _experiment(run: RunDirectory) -> ExperimentConfig:
    """The run's, with the model where this node has its own copy of it."""
    experiment = recorded_experiment(run.config.read_text())
    if (model := os.environ.get("TOWLINE_MODEL")) is None:
        return experiment
    return experiment.model_copy(update={"policy": experiment.policy.model_copy(update={"model": model})})


def _write_to(log: Path) -> None:
    """Send standard output and error, those of C libraries too, to the end of the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]


def _record_fault(
    run: RunDirectory,
    attempt: int,
    process: str,
    life: int,
    log: Path,
    error: BaseException,
    store: ControlStore | None,
) -> None:
    when = time.time()
    text = "".join(traceback.format_exception(error))
    _say(text)
    with log.open("rb") as file:
        line = sum(1 for _ in file)
    fault = {
        "process": process,
        "life": life,
        "when": when,
        "error": type(error).__name__,
        "message": str(error),
        "traceback": text,
        "log": f"{log}:{line}",
    }
    try:
        write_json(run.faults(attempt) / f"{process}.{life}.json", fault)
    except OSError as full:
        # No space left, for the log neither: the supervisor hears of it in another way, or nobody would.
        _say(json.dumps({**fault, "could_not_write": str(full)}))
        if store is not None:
            with contextlib.suppress(StoreError):
                store.set(f"fault/{process}", fault)


def _say(text: str) -> None:
    """To the log, which may lie on the full disk that is to be told of."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
