"""The supervisor: starts every process of a run, watches them, and ends the run in order. Imports no torch."""

import os
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from towline.jobs.devices import assign_gpus, visible, visible_gpus
from towline.jobs.experiment import ExperimentConfig
from towline.jobs.first_fault import Fault, killed_fault, recorded_faults
from towline.jobs.launch import Launcher, LocalLauncher, Process, ProcessSpec
from towline.jobs.store_handle import StoreHandle
from towline.storage.checkpoints import newest_step
from towline.storage.errors import RunFault, StoreError, TowlineError
from towline.storage.run_directory import RunDirectory, RunLock, read_jsonl

POLL_S = 0.2
SETTLE_S = 1.5
"""After the first sign of trouble: time for the processes concerned to write down what happened to them."""
END_GRACE_S = 5.0
START_LIMIT_S = 600.0
"""Loading a model and forming groups shows no progress for a while."""
_STARTING = ("start", "join", "load")


class Observer(Protocol):
    """Told what happens, in order. Shows it, or does nothing."""

    def on_phases(self, phases: dict[str, str]) -> None: ...

    def on_step(self, row: dict[str, Any]) -> None: ...

    def on_evaluation(self, row: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    status: str
    """ "done" or "stopped"."""
    next_step: int


def supervise(
    run: RunDirectory,
    experiment: ExperimentConfig,
    observer: Observer,
    *,
    launcher: Launcher | None = None,
    replay_step: int | None = None,
) -> Outcome:
    """Run one attempt to its end.

    Args:
        replay_step: train again up to this step from the ledger, without engines, instead.

    Raises:
        RunFault: a process failed or stalled; every process has been ended.
    """
    with RunLock(run):
        attempt = _next_attempt(run)
        if replay_step is None:
            run.write_state(status="running", attempt=attempt, pid=os.getpid(), host=socket.gethostname(),
                            started=time.time(), fault=None)  # fmt: skip
        key = bytes.fromhex(run.key.read_text())
        store = StoreHandle(key, attempt, run.log(attempt, "store"))
        supervisor = _Supervisor(run, experiment, observer, launcher or LocalLauncher(), attempt, store, replay_step)
        try:
            outcome = supervisor.run_attempt()
        except TowlineError as fault:
            if replay_step is None:
                run.write_state(status="failed", ended=time.time(), fault=str(fault))
            raise
        finally:
            supervisor.end_all()
            store.close()
        if replay_step is None:
            run.write_state(status=outcome.status, ended=time.time(), next_step=outcome.next_step)
        return outcome


@dataclass(slots=True)
class _Supervisor:
    run: RunDirectory
    experiment: ExperimentConfig
    observer: Observer
    launcher: Launcher
    attempt: int
    store: StoreHandle
    replay_step: int | None
    processes: list[Process] = field(default_factory=list[Process])
    _beats: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    """Process → its count and when it last changed, on our own clock."""
    _shown: dict[str, int] = field(default_factory=dict[str, int])

    def run_attempt(self) -> Outcome:
        self.processes = [self.launcher.start(spec) for spec in self._specs()]
        with _stop_signals() as stops:
            next_look = 0.0
            while True:
                if stops:
                    self._pass_on_stop(stops)
                now = time.monotonic()
                if now >= next_look:
                    self._look()
                    next_look = now + 1.0
                if (outcome := self._ended()) is not None:
                    self._look()
                    return outcome
                time.sleep(POLL_S)

    def _specs(self) -> list[ProcessSpec]:
        """Every process of the attempt; the trainer's ranks are one MPI world."""
        local = self.experiment.local
        devices = assign_gpus(visible_gpus(), trainer_ranks=local.trainer_ranks, engines=local.engines)
        common = {
            "TOWLINE_RUN": str(self.run.root),
            "TOWLINE_ATTEMPT": str(self.attempt),
            "TOWLINE_STORE": self.store.address,
            "TOWLINE_TRANSFER_BACKEND": devices.transfer_backend,
            # Idle threads that spin take the core from the process that works.
            "OMP_WAIT_POLICY": "passive",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # DeepSpeed compiles an optimiser that is not used when it is imported: 3 s of a core.
            "TORCHDYNAMO_DISABLE": "1",
        }
        replay = {} if self.replay_step is None else {"TOWLINE_REPLAY_STEP": str(self.replay_step)}

        def spec(
            name: str,
            module: str,
            *arguments: str,
            threads: int = 1,
            num_tasks: int | None = None,
            gpus: tuple[str, ...] = (),
        ) -> ProcessSpec:
            return ProcessSpec(
                name=name,
                module=f"towline.jobs.{module}",
                arguments=arguments,
                num_tasks=num_tasks,
                environment=common | replay | visible(gpus) | {"OMP_NUM_THREADS": str(threads)},
                log=self.run.log(self.attempt, f"{name}.launch"),
            )

        trainer = spec(
            "trainer",
            "trainer_role",
            threads=local.trainer_threads,
            num_tasks=local.trainer_ranks,
            gpus=devices.trainer,
        )
        if self.replay_step is not None:
            return [trainer]
        engines = [
            spec(f"rollout.{number}", "rollout_role", str(number), threads=local.engine_threads, gpus=gpus)
            for number, gpus in enumerate(devices.engines)
        ]
        return [trainer, *engines, spec("scorer.0", "scorer_role")]

    def _pass_on_stop(self, stops: list[int]) -> None:
        if len(stops) > 2:
            raise self._fault([Fault(process="supervisor", what="interrupted three times", log=str(self.run.root))])
        if self.store.get("stop") is None:
            self.store.set("stop", {"signal": stops[0]})
            self.run.write_state(status="stopping")

    def _look(self) -> None:
        """Show new rows, and find who stands still."""
        self._show(self.observer.on_step, "metrics", self.run.metrics)
        self._show(self.observer.on_evaluation, "evaluations", self.run.evaluations)
        try:
            heartbeats = self._heartbeats()
        except StoreError as error:
            raise self._fault(
                [Fault(process="store", what=str(error), log=str(self.run.log(self.attempt, "store")))]
            ) from error
        self.observer.on_phases({name: beat["phase"] for name, beat in heartbeats.items()})
        now = time.monotonic()
        for name, beat in heartbeats.items():
            if self._beats.get(name, (-1, 0.0))[0] != beat["beats"]:
                self._beats[name] = (beat["beats"], now)
        stalled = [
            name for name, beat in heartbeats.items() if now - self._beats[name][1] > self._limit_s(beat["phase"])
        ]
        if stalled:
            culprit = min(stalled, key=lambda name: self._beats[name][1])
            raise self._stall(culprit, heartbeats, now - self._beats[culprit][1])

    def _limit_s(self, phase: str) -> float:
        stall_s = self.experiment.run.stall_s
        return max(stall_s, START_LIMIT_S) if phase in _STARTING else stall_s

    def _stall(self, culprit: str, heartbeats: dict[str, Any], stood_s: float) -> RunFault:
        """Ask everybody where they are, then name the one that stood still first."""
        for beat in heartbeats.values():
            if beat["host"] == socket.gethostname():
                try:
                    os.kill(beat["pid"], signal.SIGUSR1)
                except ProcessLookupError:
                    continue
        time.sleep(1.0)
        phase = heartbeats[culprit]["phase"]
        what = (
            f"no progress for {stood_s:.0f} s in phase '{phase}' (limit {self._limit_s(phase):g} s, run.stall_s). "
            "The stacks of all processes are at the end of their logs"
        )
        return self._fault([Fault(process=culprit, what=what, log=str(self.run.log(self.attempt, culprit)))])

    def _heartbeats(self) -> dict[str, Any]:
        local = self.experiment.local
        names = [f"trainer.{rank}" for rank in range(local.trainer_ranks)]
        if self.replay_step is None:
            names += [f"rollout.{number}" for number in range(local.engines)] + ["scorer.0"]
        beats = {name: self.store.get(f"heartbeat/{name}") for name in names}
        return {name: beat for name, beat in beats.items() if beat is not None}

    def _ended(self) -> Outcome | None:
        """None while the run goes on; raises the first fault if a process ended that should not have."""
        codes = {process.spec.name: process.poll() for process in self.processes}
        if any(codes.values()) or self.store.poll() is not None:
            time.sleep(SETTLE_S)
            raise self._fault(self._faults())
        finished = self.store.get("finished")
        early = [name for name, code in codes.items() if code == 0 and finished is None]
        if early:
            what = "ended before the run was finished, without an error"
            raise self._fault([Fault(process=early[0], what=what, log=str(self.run.log(self.attempt, early[0])))])
        if finished is not None and all(code == 0 for code in codes.values()):
            return Outcome(status=finished["status"], next_step=finished["step"])
        return None

    def _faults(self) -> list[Fault]:
        """First fault first. A process killed from outside comes before the errors that its peers then met."""
        killed: list[Fault] = []
        for process in self.processes:
            code, spec = process.poll(), process.spec
            recorded = {fault.process for fault in recorded_faults(self.run, self.attempt)}
            if code:
                fault = killed_fault(self.run, self.attempt, spec.name, code, spec.log)
                if fault is not None and fault.process not in recorded:
                    killed.append(fault)
        if self.store.poll() is not None:
            log = str(self.run.log(self.attempt, "store"))
            killed.insert(0, Fault(process="store", what=f"ended with code {self.store.poll()}", log=log))
        faults = killed + recorded_faults(self.run, self.attempt)
        ended = next((p for p in self.processes if p.poll()), None)
        if not faults and ended is not None:
            what = f"ended with code {ended.poll()}; its log's last lines: {_tail(ended.spec.log)}"
            faults = [Fault(process=ended.spec.name, what=what, log=str(ended.spec.log))]
        return faults

    def _fault(self, faults: list[Fault]) -> RunFault:
        first = faults[0]
        kept = newest_step(self.run.checkpoints)
        lines = [
            f"{self.run.root.name} FAILED: {first.process}: {first.what}",
            *(f"    {line}" for line in first.traceback.strip().splitlines()[-6:]),
            f"  log     {first.log}",
            f"  kept    {'no checkpoint' if kept is None else f'checkpoint {kept}'}; nothing sealed was lost",
        ]
        if len(faults) > 1:
            lines.append(f"  after   {', '.join(fault.process for fault in faults[1:])} (see faults/ beside the logs)")
        return RunFault("\n".join(lines), checkpoint_kept=kept is not None)

    def end_all(self) -> None:
        for process in reversed(self.processes):
            process.end(0.0 if process.poll() is not None else END_GRACE_S)

    def _show(self, show: Any, name: str, path: Any) -> None:
        rows = read_jsonl(path)
        for row in rows[self._shown.get(name, 0) :]:
            show(row)
        self._shown[name] = len(rows)


def _next_attempt(run: RunDirectory) -> int:
    attempt = run.attempts
    run.logs(attempt).mkdir(parents=True)
    return attempt


def _tail(log: Any) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-3:]) if log.is_file() else ""


@contextmanager
def _stop_signals() -> Generator[list[int]]:
    """Collect SIGINT and SIGTERM; handlers only note them."""
    stops: list[int] = []
    previous = {
        number: signal.signal(number, lambda received, frame: stops.append(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield stops
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
