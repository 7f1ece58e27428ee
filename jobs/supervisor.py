"""The supervisor: starts every process of a run, watches them, starts engines and scorers again that end, and ends the
run in order. Imports no torch."""

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import psutil

from towline.jobs.deadline import Deadline
from towline.jobs.experiment import ExperimentConfig
from towline.jobs.first_fault import Fault, first_faults, run_fault
from towline.jobs.fleet import FINISH_WITHIN_S, STOP_WITHIN_S, Fleet, NodeLost
from towline.jobs.launch import Launcher, LocalLauncher
from towline.jobs.member import Member
from towline.jobs.processes import TRAINER, Attempt
from towline.jobs.resume import prepare_resume
from towline.jobs.row_feed import RowFeed
from towline.jobs.stall_report import ask_for_stacks, write_stall_report
from towline.jobs.standstill import Standstill, Watch
from towline.jobs.start_up import Milestones, has_started, start_up_lines
from towline.jobs.store_handle import StoreHandle
from towline.storage.errors import RunFault, StoreError, TowlineError
from towline.storage.run_directory import RunDirectory, RunLock

POLL_S = 0.2
SETTLE_S = 1.5
"""After the first sign of trouble: time for the processes concerned to write down what happened to them."""


class Observer(Protocol):
    """Told what happens, in order. Shows it, or does nothing."""

    def on_attempt(self, number: int) -> None:
        """An attempt begins; nothing of it is started yet."""
        ...

    def on_phases(self, phases: dict[str, str]) -> None: ...

    def on_step(self, row: dict[str, Any]) -> None: ...

    def on_evaluation(self, row: dict[str, Any]) -> None: ...

    def on_event(self, text: str) -> None:
        """Something out of the ordinary that the run survives."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    status: str
    """ "done" or "stopped"."""
    next_step: int
    why: str = ""
    """It was stopped: a `Reason` of `deadline.py`."""


def supervise(
    run: RunDirectory,
    experiment: ExperimentConfig,
    observer: Observer,
    *,
    launcher: Launcher | None = None,
    deadline: Deadline | None = None,
    replay_step: int | None = None,
) -> Outcome:
    """Run one attempt to its end, from the newest checkpoint if there is one.

    Args:
        deadline: when to stop; default: when a signal says so.
        replay_step: train again up to this step from the ledger, without engines, instead.

    Raises:
        RunFault: a process failed or stalled; every process has been ended.
    """
    supervised = time.time()
    deadline = deadline or Deadline(ask_end=lambda: None)
    with deadline.noting_signals(), RunLock(run):
        is_replay = replay_step is not None
        number = _next_attempt(run)
        if not is_replay:
            observer.on_attempt(number)
        resume_step = None if is_replay else prepare_resume(run, number, experiment, observer.on_event)
        attempt = Attempt(
            run=run, number=number, experiment=experiment, resume_step=resume_step, replay_step=replay_step
        )
        if not is_replay:
            run.write_state(status="running", attempt=number, pid=os.getpid(), host=socket.gethostname(),
                            started=time.time(), ended=None, fault=None)  # fmt: skip
        try:
            outcome = _carry_out(attempt, observer, launcher, deadline, supervised)
        except TowlineError as fault:
            if not is_replay:
                with contextlib.suppress(OSError):  # the disk may be full, and the fault itself must be read
                    # Slurm ends steps in no order when it takes the job away; whoever goes first is no culprit.
                    status = "interrupted" if deadline.is_being_ended else "failed"
                    run.write_state(status=status, ended=time.time(), fault=str(fault))
            raise
        if not is_replay:
            run.write_state(status=outcome.status, ended=time.time(), next_step=outcome.next_step)
        return outcome


def _carry_out(
    attempt: Attempt, observer: Observer, launcher: Launcher | None, deadline: Deadline, supervised: float
) -> Outcome:
    local = attempt.experiment.local
    launcher = launcher or LocalLauncher(trainer_ranks=local.trainer_ranks, engines=attempt.experiment.num_engines)
    key, log = bytes.fromhex(attempt.run.key.read_text()), attempt.run.log(attempt.number, "store")
    store = StoreHandle(key, attempt.number, log, launcher.store_command())
    supervisor = _Supervisor(attempt, observer, launcher, store, deadline, supervised)
    try:
        return supervisor.run_attempt()
    finally:
        supervisor.fleet.end_all()
        store.close()


@dataclass(slots=True)
class _Supervisor:
    attempt: Attempt
    observer: Observer
    launcher: Launcher
    store: StoreHandle
    deadline: Deadline
    supervised: float
    """When the supervisor began, s since the epoch."""
    watch: Watch = field(init=False)
    fleet: Fleet = field(init=False)
    _feeds: tuple[RowFeed, ...] = field(init=False)
    _why: str = ""
    _has_started: bool = False

    def __post_init__(self) -> None:
        self.watch = Watch(self.attempt.experiment.run.stall_s)
        self.fleet = Fleet(self.attempt, self.launcher, self.store, self.watch, self._tell)
        steps = RowFeed(self._run.metrics, self._on_step)
        evaluations = RowFeed(self._run.evaluations, self.observer.on_evaluation)
        self._feeds = (steps, evaluations, RowFeed(self._run.alarms, lambda row: self._tell(row["text"])))

    def run_attempt(self) -> Outcome:
        self.fleet.start_due()
        launched = time.time()
        next_look = 0.0
        while True:
            self.fleet.start_due()
            try:
                if (reason := self.deadline.reason()) is not None:
                    self._pass_on_stop(reason)
                if (now := time.monotonic()) >= next_look:
                    self._look(launched)
                    next_look = now + 1.0
                outcome = self._ended()
            except StoreError as error:
                time.sleep(SETTLE_S)
                raise self._fault([Fault(process="store", what=str(error), log=self._log("store"))]) from error
            if outcome is not None:
                self._show_rows()
                return outcome
            time.sleep(POLL_S)

    @property
    def _run(self) -> RunDirectory:
        return self.attempt.run

    def _pass_on_stop(self, reason: str) -> None:
        if self.deadline.signals.count(signal.SIGINT) > 2:
            raise self._fault([Fault(process="supervisor", what="interrupted three times", log=str(self._run.root))])
        if not self._why:
            self._why = reason
            self.store.set("stop", {"why": reason})
            self._run.write_state(status="stopping")
            self._tell(f"stopping ({reason}): {self.deadline}")

    def _look(self, launched: float) -> None:
        """Show new rows, and see to those who stand still."""
        self._show_rows()
        self.watch.look(self._heartbeats())
        self.deadline.told |= {beat.get("signal", 0) for beat in self.watch.beats.values()} - {0}
        if (saved := self.store.get("saved")) is not None:
            self.deadline.save_s = max(self.deadline.save_s, saved["seconds"])
        self.fleet.free_leases_of_the_silent()
        self.fleet.end_refused_engines()
        self._note_start_up(launched)
        self.observer.on_phases({name: beat["phase"] for name, beat in self.watch.beats.items()})
        if (culprit := self.watch.culprit()) is not None:
            self._stalled(culprit)

    def _note_start_up(self, launched: float) -> None:
        if self._has_started or not has_started(self.watch.beats):
            return
        self._has_started = True
        milestones = Milestones(
            began=psutil.Process().create_time(),
            supervised=self.supervised,
            asked=self.store.asked,
            stored=self.store.ready,
            launched=launched,
        )
        for line in start_up_lines(milestones, self.watch.beats):
            self._note(line)

    def _show_rows(self) -> None:
        for feed in self._feeds:
            feed.poll()

    def _on_step(self, row: dict[str, Any]) -> None:
        self.deadline.note_step(row)
        self.observer.on_step(row)

    def _heartbeats(self) -> dict[str, Any]:
        lives = {member.name: member.life for member in self.fleet.members}
        beats = {name: self.store.get(f"heartbeat/{name}") for name in self.attempt.heartbeats}
        return {name: beat for name, beat in beats.items() if beat is not None and beat["life"] == lives.get(name, 0)}

    def _stalled(self, culprit: Standstill) -> None:
        """Ask everybody where they are, then end the one that stood still first, or the run."""
        logs = partial(self._run.log, self.attempt.number)
        asked = ask_for_stacks(self.watch.beats, logs, elsewhere=self.fleet.signal_all)
        report = self._run.logs(self.attempt.number) / "stall.log"
        write_stall_report(report, culprit, self.watch.beats, asked, self.attempt)
        member = next((one for one in self.fleet.members if one.name == culprit.process), None)
        if member is not None and self.fleet.may_restart(member):
            self._tell(f"{culprit.process} {culprit}; it is ended. Stacks: {report}")
            member.end(0.0)
            self.watch.forget(member.name)
            return
        what = f"{culprit}, run.stall_s. What everybody did: {report}"
        raise self._fault([Fault(process=culprit.process, what=what, log=self._log(culprit.process))])

    def _ended(self) -> Outcome | None:
        """None while the run goes on; raises the first fault if a process ended that the run cannot do without."""
        codes = self.fleet.codes()
        if self.store.poll() is not None or any(codes.values()):
            time.sleep(SETTLE_S)
            codes = self.fleet.codes()
            if self.store.poll() is not None or codes[TRAINER]:
                raise self._fault(self._faults())
        finished = self.store.get("finished")
        for member in self.fleet.members:
            code = codes[member.name]
            if code is None or member.is_retired or (finished is not None and (code == 0 or member.can_restart)):
                continue  # nothing more is asked of an engine or a scorer, however it ends
            if not self.fleet.may_restart(member):
                raise self._fault(self._faults() or [_ended_early(member)])
            self._restart(member)
        within_s = STOP_WITHIN_S if self._why else FINISH_WITHIN_S
        if finished is not None and self.fleet.have_all_ended(codes, within_s=within_s):
            return Outcome(status=finished["status"], next_step=finished["step"], why=self._why)
        return None

    def _restart(self, member: Member) -> None:
        why = next(fault.what for fault in [*self._faults(), _ended_early(member)] if fault.process == member.name)
        try:
            self.fleet.restart(member, why)
        except NodeLost as lost:
            raise self._fault([lost.fault]) from lost

    def _tell(self, text: str) -> None:
        self.observer.on_event(text)
        self._note(text)

    def _note(self, text: str) -> None:
        with contextlib.suppress(OSError), self._run.log(self.attempt.number, "supervisor").open("a") as log:
            log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")

    def _faults(self) -> list[Fault]:
        told: list[dict[str, Any]] = []
        with contextlib.suppress(StoreError):  # it may be the store that failed
            told += [
                fault for name in self.attempt.heartbeats if (fault := self.store.get(f"fault/{name}")) is not None
            ]
        return first_faults(self._run, self.attempt.number, self.fleet.members, self.store.poll(), told)

    def _fault(self, faults: list[Fault]) -> RunFault:
        return run_fault(self._run, faults, can_resume=self.attempt.replay_step is None)

    def _log(self, process: str) -> str:
        return str(self._run.log(self.attempt.number, process))


def _ended_early(member: Member) -> Fault:
    what = f"ended with code {member.poll()} before the run was finished"
    return Fault(process=member.name, what=what, log=str(member.spec.log))


def _next_attempt(run: RunDirectory) -> int:
    attempt = run.attempts
    run.logs(attempt).mkdir(parents=True)
    return attempt
