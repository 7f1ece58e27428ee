"""Who generates which chunk. A lease is taken and given back by compare-and-set in the control store.

    lease/{work}/{chunk}          {"holder": [process, life, nonce] or None, "lost": how often it was lost}
    leases/{process}/{life}       names of the leases that this life of a process may hold

A process notes a lease before it takes it, so that whoever finds the process dead knows every lease it can have.
Imports no torch: engines take leases, the supervisor gives back those of the dead.
"""

import secrets
from dataclasses import dataclass, field
from typing import Any, Protocol

MAX_LOST = 3
"""A chunk lost as often as this kills its engines, more likely than not: its groups are given up."""


class Store(Protocol):
    def get(self, name: str) -> Any | None: ...

    def set(self, name: str, value: Any) -> None: ...

    def exchange(self, name: str, old: Any | None, new: Any) -> bool: ...


@dataclass(slots=True)
class Leases:
    """Those of one life of one process."""

    store: Store
    process: str
    life: int
    held: list[str] = field(default_factory=list[str])

    def take(self, name: str) -> bool:
        if name in self.held:
            return False  # still at work on it, though it was given back for us: we were taken for dead
        standing = self.store.get(name)
        if standing is not None and standing["holder"] is not None:
            return False
        lost = 0 if standing is None else standing["lost"]
        self._note([*self.held, name])
        holder = [self.process, self.life, secrets.token_hex(8)]
        if self.store.exchange(name, standing, {"holder": holder, "lost": lost}):
            return True
        self._note([one for one in self.held if one != name])
        return False

    def done(self, name: str) -> None:
        """The chunk is sealed and announced. Its lease stays taken: nobody need look at it again."""
        self._note([one for one in self.held if one != name])

    def _note(self, held: list[str]) -> None:
        self.held = held
        self.store.set(held_leases(self.process, self.life), held)


def held_leases(process: str, life: int) -> str:
    """Where the store has the names of the leases that this life of a process may hold."""
    return f"leases/{process}/{life}"


def free_leases(store: Store, process: str, life: int) -> tuple[list[str], list[str]]:
    """Give back what a dead or silent process holds; return the leases that are free again, and those given up."""
    free: list[str] = []
    given_up: list[str] = []
    for name in store.get(held_leases(process, life)) or []:
        standing = store.get(name)
        if standing is None or standing["holder"] is None or standing["holder"][:2] != [process, life]:
            continue
        lost = standing["lost"] + 1
        is_hopeless = lost >= MAX_LOST
        # A chunk that is given up stays taken.
        after = {"holder": ["supervisor", 0, ""] if is_hopeless else None, "lost": lost}
        if store.exchange(name, standing, after):
            (given_up if is_hopeless else free).append(name)
    return free, given_up
