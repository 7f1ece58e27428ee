"""The supervisor: starts every process of a run, watches them, starts engines and scorers again that end, and ends the
run in order. Imports no torch."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import psutil

from towline.jobs.deadline import Deadline
from towline.jobs.experiment import ExperimentConfig
from towline.jobs.first_fault import Fault, first_faults, run_fault
from towline.jobs.launch import Launcher, LocalLauncher
from towline.jobs.leases import free_leases
from towline.jobs.lost_chunks import give_up
from towline.jobs.member import Member
from towline.jobs.processes import TRAINER, Attempt
from towline.jobs.resume import prepare_resume
from towline.jobs.stall_report import ask_for_stacks, write_stall_report
from towline.jobs.standstill import STARTING, Standstill, Watch
from towline.jobs.start_up import LOADED, Milestones, has_started, start_up_lines
from towline.jobs.store_handle import StoreHandle
from towline.storage.errors import RunFault, StoreError, TowlineError
from towline.storage.run_directory import RunDirectory, RunLock, read_jsonl

POLL_S = 0.2
SETTLE_S = 1.5
"""After the first sign of trouble: time for the processes concerned to write down what happened to them."""
END_GRACE_S = 5.0
FINISH_WITHIN_S = 15.0
"""For engines and scorers to end after the trainer."""


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
    with RunLock(run):
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
        launcher = launcher or LocalLauncher(
            trainer_ranks=experiment.local.trainer_ranks, engines=experiment.local.engines
        )
        store = StoreHandle(
            bytes.fromhex(run.key.read_text()), number, run.log(number, "store"), launcher.store_command()
        )
        deadline = deadline or Deadline(ask_end=lambda: None)
        with _noted_signals(deadline.signals):
            supervisor = _Supervisor(attempt, observer, launcher, store, deadline, supervised)
            try:
                outcome = supervisor.run_attempt()
            except TowlineError as fault:
                if not is_replay:
                    with contextlib.suppress(OSError):  # the disk may be full, and the fault itself must be read
                        # Slurm ends steps in no order when it takes the job away; whoever goes first is no culprit.
                        status = "interrupted" if deadline.is_being_ended else "failed"
                        run.write_state(status=status, ended=time.time(), fault=str(fault))
                raise
            finally:
                supervisor.end_all()
                store.close()
        if not is_replay:
            run.write_state(status=outcome.status, ended=time.time(), next_step=outcome.next_step)
        return outcome


@dataclass(slots=True)
class _Supervisor:
    attempt: Attempt
    observer: Observer
    launcher: Launcher
    store: StoreHandle
    deadline: Deadline
    supervised: float = field(default_factory=time.time)
    """When the supervisor began, s since the epoch."""
    members: list[Member] = field(default_factory=list[Member])
    watch: Watch = field(init=False)
    _shown: dict[Path, int] = field(default_factory=dict[Path, int])
    """Rows of each file that the observer has been told."""
    _sizes: dict[Path, int] = field(default_factory=dict[Path, int])
    _why: str = ""
    _trainer_ended: float = 0.0
    _launched: float = 0.0
    _has_started: bool = False

    def __post_init__(self) -> None:
        self.watch = Watch(self.attempt.experiment.run.stall_s)
        # An attempt tells what it does, not what the earlier ones did.
        self._shown = {path: len(read_jsonl(path)) for path in (self._run.metrics, self._run.evaluations)}

    def run_attempt(self) -> Outcome:
        specs = self.attempt.processes(self.store.address, self.launcher.transfer_backend)
        self.members = [Member(spec, self.launcher) for spec in specs]
        for member in self.members:
            member.start_if_due()
        self._launched = time.time()
        next_look = 0.0
        while True:
            for member in self.members:
                member.start_if_due()
            try:
                if (reason := self.deadline.reason()) is not None:
                    self._pass_on_stop(reason)
                if (now := time.monotonic()) >= next_look:
                    self._look()
                    next_look = now + 1.0
                outcome = self._ended()
            except StoreError as error:
                time.sleep(SETTLE_S)
                raise self._fault([Fault(process="store", what=str(error), log=self._log("store"))]) from error
            if outcome is not None:
                self._show_rows()
                return outcome
            time.sleep(POLL_S)

    def end_all(self) -> None:
        for member in reversed(self.members):
            member.end(END_GRACE_S)

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

    def _look(self) -> None:
        """Show new rows, and see to those who stand still."""
        self._show_rows()
        self.watch.look(self._heartbeats())
        self.deadline.told += [beat["signal"] for beat in self.watch.beats.values() if beat.get("signal")]
        if (saved := self.store.get("saved")) is not None:
            self.deadline.save_s = max(self.deadline.save_s, saved["seconds"])
        self._free_leases_of_the_silent()
        self._end_refused_engines()
        self._tell_start_up()
        self.observer.on_phases({name: beat["phase"] for name, beat in self.watch.beats.items()})
        if (culprit := self.watch.culprit()) is not None:
            self._stalled(culprit)

    def _tell_start_up(self) -> None:
        if not self._has_started and has_started(self.watch.beats):
            self._has_started = True
            milestones = Milestones(
                began=psutil.Process().create_time(),
                supervised=self.supervised,
                asked=self.store.asked,
                stored=self.store.ready,
                launched=self._launched,
            )
            for line in start_up_lines(milestones, self.watch.beats):
                self._note(line)

    def _show_rows(self) -> None:
        self._show(self._on_step, self._run.metrics)
        self._show(self.observer.on_evaluation, self._run.evaluations)

    def _on_step(self, row: dict[str, Any]) -> None:
        self.deadline.note_step(row)
        self.observer.on_step(row)

    def _heartbeats(self) -> dict[str, Any]:
        lives = {member.name: member.life for member in self.members}
        beats = {name: self.store.get(f"heartbeat/{name}") for name in self.attempt.heartbeats}
        return {name: beat for name, beat in beats.items() if beat is not None and beat["life"] == lives.get(name, 0)}

    def _free_leases_of_the_silent(self) -> None:
        """Others may take over what a stopped engine holds. Should it wake up, its shards come late and are set aside.

        Only if there are others: alone it would be chased by its own leases.
        """
        engines = [member for member in self.members if member.name.startswith("rollout.")]
        for member in engines if len(engines) > 1 else ():
            stood_s = self.watch.stood_s(member.name)
            # While it loads it has none; what it takes right after was not held for so long.
            loads = self.watch.beats.get(member.name, {"phase": STARTING[0]})["phase"] in (*STARTING, LOADED)
            if not loads and stood_s > self.attempt.experiment.run.lease_s and (chunks := self._free_leases(member)):
                self._tell(f"{member.name} made no progress for {stood_s:.0f} s: others take over {chunks}")

    def _free_leases(self, member: Member) -> str:
        """Give back what it holds; return which chunks, in words."""
        free, given_up = free_leases(self.store, member.name, member.life)
        for lease in given_up:
            give_up(self._run, self.store, lease, self.attempt.number)
            self._tell(f"{lease} was lost three times and is given up: its groups count as lost")
        return ", ".join(lease.removeprefix("lease/") for lease in free)

    def _end_refused_engines(self) -> None:
        for member in self.members:
            request = self.store.get(f"restart/{member.name}")
            if request is not None and request["life"] == member.life and member.is_running:
                self._tell(request["why"])
                member.end(0.0)

    def _stalled(self, culprit: Standstill) -> None:
        """Ask everybody where they are, then end the one that stood still first, or the run."""
        logs = partial(self._run.log, self.attempt.number)
        asked = ask_for_stacks(self.watch.beats, logs, elsewhere=self._signal_all)
        report = self._run.logs(self.attempt.number) / "stall.log"
        write_stall_report(report, culprit, self.watch.beats, asked, self.attempt)
        member = next((one for one in self.members if one.name == culprit.process), None)
        if member is not None and self._may_restart(member):
            self._tell(f"{culprit.process} {culprit}; it is ended. Stacks: {report}")
            member.end(0.0)
            self.watch.forget(member.name)
            return
        what = f"{culprit}, run.stall_s. What everybody did: {report}"
        raise self._fault([Fault(process=culprit.process, what=what, log=self._log(culprit.process))])

    def _signal_all(self, number: int) -> None:
        for member in self.members:
            member.signal(number)

    def _ended(self) -> Outcome | None:
        """None while the run goes on; raises the first fault if a process ended that the run cannot do without."""
        codes = {member.name: member.poll() for member in self.members}
        if self.store.poll() is not None or any(codes.values()):
            time.sleep(SETTLE_S)
            codes = {member.name: member.poll() for member in self.members}
            if self.store.poll() is not None or codes[TRAINER]:
                raise self._fault(self._faults())
        finished = self.store.get("finished")
        for member in self.members:
            code = codes[member.name]
            if code is None or member.is_retired or (finished is not None and (code == 0 or member.can_restart)):
                continue  # nothing more is asked of an engine or a scorer, however it ends
            if self._may_restart(member):
                self._restart(member)
                continue
            raise self._fault(self._faults() or [_ended_early(member)])
        if finished is not None and self._have_all_ended(codes):
            return Outcome(status=finished["status"], next_step=finished["step"], why=self._why)
        return None

    def _have_all_ended(self, codes: dict[str, int | None]) -> bool:
        """Once the trainer has, the others have a moment: one whose node is gone without a word would never end."""
        left = [member.name for member in self.members if member.is_running and codes[member.name] is None]
        if not left or TRAINER in left:
            return not left
        self._trainer_ended = self._trainer_ended or time.monotonic()
        if time.monotonic() - self._trainer_ended < FINISH_WITHIN_S:
            return False
        self._tell(f"not ended by itself, and ended now: {', '.join(left)}")
        return True

    def _may_restart(self, member: Member) -> bool:
        """Not one that never got as far as serving: it would fail in the same way again."""
        has_served = member.life > 0 or member.name in self._served()
        return member.can_restart and has_served and member.life < self.attempt.experiment.run.max_restarts

    def _served(self) -> set[str]:
        """Processes that have passed their start."""
        engines = {
            f"rollout.{n}" for n in range(self.attempt.experiment.local.engines) if self.store.get(f"engine/{n}")
        }
        scorers = {
            f"scorer.{n}": self.store.get(f"heartbeat/scorer.{n}") for n in range(self.attempt.experiment.num_scorers)
        }
        others = {name for name, beat in scorers.items() if beat is not None and beat["phase"] != STARTING[0]}
        return engines | others

    def _restart(self, member: Member) -> None:
        what = next(fault.what for fault in [*self._faults(), _ended_early(member)] if fault.process == member.name)
        member.end(0.0)
        self.store.set(f"gone/{member.name}", member.life)
        chunks = self._free_leases(member)
        self.watch.forget(member.name)
        if (node := self.launcher.lost_node(member.spec)) is not None:
            self._retire(member, node, what)
            return
        pause = member.begin_next_life()
        limit = self.attempt.experiment.run.max_restarts
        self._tell(
            f"{member.name}: {what}; it starts again in {pause:g} s ({member.life} of {limit})"
            f"{f', {chunks} is free for others' if chunks else ''}"
        )

    def _retire(self, member: Member, node: str, what: str) -> None:
        """Go on without it, as long as another engine is left."""
        member.retire()
        engines = [one for one in self.members if one.name.startswith("rollout.")]
        left = [one for one in engines if not one.is_retired]
        if not left or member not in engines:
            raise self._fault(
                [Fault(process=member.name, what=f"node {node} is lost: {what}", log=str(member.spec.log))]
            )
        self._tell(f"{member.name}: node {node} is lost; the run goes on with {len(left)} of {len(engines)} engines")

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
        return first_faults(self._run, self.attempt.number, self.members, self.store.poll(), told)

    def _fault(self, faults: list[Fault]) -> RunFault:
        return run_fault(self._run, faults, can_resume=self.attempt.replay_step is None)

    def _log(self, process: str) -> str:
        return str(self._run.log(self.attempt.number, process))

    def _show(self, show: Callable[[dict[str, Any]], None], path: Path) -> None:
        size = path.stat().st_size if path.is_file() else 0
        if size == self._sizes.get(path):
            return
        self._sizes[path] = size
        rows = read_jsonl(path)
        for row in rows[self._shown.get(path, 0) :]:
            show(row)
        self._shown[path] = len(rows)


def _ended_early(member: Member) -> Fault:
    what = f"ended with code {member.poll()} before the run was finished"
    return Fault(process=member.name, what=what, log=str(member.spec.log))


def _next_attempt(run: RunDirectory) -> int:
    attempt = run.attempts
    run.logs(attempt).mkdir(parents=True)
    return attempt


@contextmanager
def _noted_signals(received: list[int]) -> Generator[None]:
    """Add SIGINT, SIGTERM and SIGUSR2 to the list; handlers do no more than that."""
    previous = {
        number: signal.signal(number, lambda number, frame: received.append(number))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
