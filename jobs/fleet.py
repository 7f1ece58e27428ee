"""The processes of one attempt: started, started again when they end, done without when their node is lost."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from towline.jobs.first_fault import Fault
from towline.jobs.launch import Launcher
from towline.jobs.leases import free_leases, held_leases
from towline.jobs.lost_chunks import give_up
from towline.jobs.member import Member
from towline.jobs.processes import TRAINER, Attempt
from towline.jobs.standstill import STARTING, Watch
from towline.jobs.store_handle import StoreHandle

END_GRACE_S = 5.0
FINISH_WITHIN_S = 15.0
"""For engines and scorers to end after the trainer, when the run is done."""
STOP_WITHIN_S = 3.0
"""The same when it was told to stop: Slurm may be about to end the job."""


class NodeLost(Exception):
    """The run cannot do without what ran there."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.what)
        self.fault = fault


@dataclass(slots=True)
class Fleet:
    """
    Args:
        tell: told of what the run survives.
    """

    attempt: Attempt
    launcher: Launcher
    store: StoreHandle
    watch: Watch
    tell: Callable[[str], None]
    members: list[Member] = field(init=False)
    _trainer_ended: float = 0.0
    _holdings: dict[str, tuple[tuple[int, list[str]], float]] = field(
        default_factory=dict[str, tuple[tuple[int, list[str]], float]]
    )
    """Engine → its life with the leases that it holds, and when these were first seen."""

    def __post_init__(self) -> None:
        specs = self.attempt.processes(self.store.address, self.launcher.transfer_backend)
        self.members = [Member(spec, self.launcher) for spec in specs]

    def start_due(self) -> None:
        for member in self.members:
            member.start_if_due()

    def codes(self) -> dict[str, int | None]:
        """Exit code of each present life; None while it runs."""
        return {member.name: member.poll() for member in self.members}

    def signal_all(self, number: int) -> None:
        for member in self.members:
            member.signal(number)

    def end_all(self) -> None:
        for member in reversed(self.members):
            member.end(END_GRACE_S)

    def have_all_ended(self, codes: dict[str, int | None], *, within_s: float) -> bool:
        """Once the trainer has, the others have a moment: one whose node is gone without a word would never end."""
        left = [member.name for member in self.members if member.is_running and codes[member.name] is None]
        if not left or TRAINER in left:
            return not left
        self._trainer_ended = self._trainer_ended or time.monotonic()
        if time.monotonic() - self._trainer_ended < within_s:
            return False
        self.tell(f"not ended by itself, and ended now: {', '.join(left)}")
        return True

    def may_restart(self, member: Member) -> bool:
        """Not one that never got as far as serving: it would fail in the same way again."""
        has_served = member.life > 0 or member.name in self._served()
        return member.can_restart and has_served and member.life < self.attempt.experiment.run.max_restarts

    def restart(self, member: Member, why: str) -> None:
        """
        Raises:
            NodeLost: it cannot be started again, and is the last of its kind.
        """
        member.end(0.0)
        self.store.set(f"gone/{member.name}", member.life)
        chunks = self._free_leases(member)
        self.watch.forget(member.name)
        if (node := self.launcher.lost_node(member.spec)) is not None:
            self._retire(member, node, why)
            return
        pause = member.begin_next_life()
        limit = self.attempt.experiment.run.max_restarts
        self.tell(
            f"{member.name}: {why}; it starts again in {pause:g} s ({member.life} of {limit})"
            f"{f', {chunks} is free for others' if chunks else ''}"
        )

    def free_leases_of_the_silent(self) -> None:
        """Others may take over what a stopped engine holds. Should it wake up, its shards come late and are set aside.

        Only if there are others: alone it would be chased by its own leases.
        """
        for member in self._engines if len(self._engines) > 1 else ():
            stood_s = self.watch.stood_s(member.name)
            # What it took after a long load was not held for so long. Its phase does not tell: that is a second old.
            silent_s = min(stood_s, self._held_s(member))
            if silent_s > self.attempt.experiment.run.lease_s and (chunks := self._free_leases(member)):
                self.tell(f"{member.name} made no progress for {stood_s:.0f} s: others take over {chunks}")

    def _held_s(self, member: Member) -> float:
        """For how long it has been seen to hold the leases that it holds now."""
        holding = (member.life, self.store.get(held_leases(member.name, member.life)) or [])
        seen, since = self._holdings.get(member.name, (None, 0.0))
        if seen != holding:
            since = time.monotonic()
            self._holdings[member.name] = (holding, since)
        return time.monotonic() - since if holding[1] else 0.0

    def end_refused_engines(self) -> None:
        """Those that the trainer wants to be started again."""
        for member in self.members:
            request = self.store.get(f"restart/{member.name}")
            if request is not None and request["life"] == member.life and member.is_running:
                self.tell(request["why"])
                member.end(0.0)

    @property
    def _engines(self) -> list[Member]:
        return [member for member in self.members if member.name.startswith("rollout.")]

    def _served(self) -> set[str]:
        """Processes that have passed their start."""
        experiment = self.attempt.experiment
        engines = {f"rollout.{n}" for n in range(experiment.num_engines) if self.store.get(f"engine/{n}")}
        beats = {f"scorer.{n}": self.store.get(f"heartbeat/scorer.{n}") for n in range(experiment.num_scorers)}
        return engines | {name for name, beat in beats.items() if beat is not None and beat["phase"] != STARTING[0]}

    def _free_leases(self, member: Member) -> str:
        """Give back what it holds; return which chunks, in words."""
        free, given_up = free_leases(self.store, member.name, member.life)
        for lease in given_up:
            give_up(self.attempt.run, self.store, lease, self.attempt.number)
            self.tell(f"{lease} was lost three times and is given up: its groups count as lost")
        return ", ".join(lease.removeprefix("lease/") for lease in free)

    def _retire(self, member: Member, node: str, why: str) -> None:
        """Go on without it, as long as another engine is left."""
        member.retire()
        left = [one for one in self._engines if not one.is_retired]
        if not left or member not in self._engines:
            what = f"node {node} is lost: {why}"
            raise NodeLost(Fault(process=member.name, what=what, log=str(member.spec.log)))
        self.tell(
            f"{member.name}: node {node} is lost; the run goes on with {len(left)} of {len(self._engines)} engines"
        )
