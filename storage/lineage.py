"""Which weights each version of the policy stands for, and which rollouts may still be learned from.

A version is a pair (branch, number). A run begins on branch 0. When the same number comes to stand for other weights,
because a resumed run trained differently or the gate rolled back, a new branch is opened. Its `fork` is the first
number that is its own; every smaller one it shares with its `parent`, which is the branch that owns `fork - 1`:

    version    0  1  2  3  4  5  6  7
    branch 0   o  o  o  o  o  o
    branch 1            o  o  o  o        parent 0, fork 3: shares 0, 1, 2 with branch 0
    branch 2                  o  o  o     parent 1, fork 5: shares 0, 1, 2 with branch 0 and 3, 4 with branch 1

`lineage.jsonl` is only ever added to, one line for a version and one for a fork, each on the disk before anybody acts
on it. One process writes at a time.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, NonNegativeInt, TypeAdapter, ValidationError

from towline.storage.errors import LedgerError
from towline.storage.publish import fsync
from towline.storage.records import ShardOrigin
from towline.storage.run_directory import RunDirectory

FIRST_BRANCH = 0
_SHOWN_DIGITS = 12


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Version(_Line):
    """A line of lineage.jsonl: these weights were published."""

    branch: NonNegativeInt
    version: NonNegativeInt
    digest: str
    """Of the weight stream, as an engine hashes what it receives."""
    attempt: int


class Fork(_Line):
    """A line of lineage.jsonl: a branch begins."""

    branch: NonNegativeInt
    parent: NonNegativeInt
    fork: NonNegativeInt
    """The first version that is the branch's own."""
    attempt: int


_LINE: TypeAdapter[Version | Fork] = TypeAdapter(Version | Fork)


class Lineage:
    """
    lineage = Lineage.open(run, attempt)
    lineage.continue_from(checkpoint_branch)     # a resume
    forked = lineage.settle(version, digest)     # at each publication
    branch = lineage.open_branch(version + 1)    # the gate rolled back to `version`
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._path = path
        self._attempt = attempt
        self._branch = FIRST_BRANCH
        self._forks: dict[int, Fork] = {}
        self._versions: dict[tuple[int, int], Version] = {}

    @classmethod
    def open(cls, run: RunDirectory, attempt: int) -> Self:
        """Read what is there, and change nothing. A last line that a killed writer left unfinished is ignored.

        The current branch is the one that was written to last.

        Raises:
            LedgerError: any other line is not one that this class writes.
        """
        lineage = cls(run.lineage, attempt)
        for number, text in enumerate(_whole_lines(run.lineage), start=1):
            try:
                lineage._take(_LINE.validate_json(text))
            except ValueError as error:
                raise LedgerError(
                    f"{run.lineage}:{number}: {_shortened(text)} is no record of a version or fork ({_reason(error)}). "
                    "The file is only ever added to: restore it from a copy. The shards are not affected."
                ) from error
        return lineage

    @property
    def branch(self) -> int:
        """The current one."""
        return self._branch

    @property
    def forks(self) -> tuple[Fork, ...]:
        """Every branch but the first, in the order in which they were opened."""
        return tuple(self._forks.values())

    def versions(self, branch: int) -> list[int]:
        """The recorded versions that are the branch's own, ascending."""
        return sorted(version for owner, version in self._versions if owner == branch)

    def continue_from(self, branch: int) -> None:
        """Make `branch`, that of the checkpoint a resume goes on from, the current one."""
        self._check(branch)
        self._branch = branch

    def digest(self, version: int) -> str | None:
        """Of the weights that `version` stands for on the current branch; None: not recorded."""
        found = self._versions.get((self._owner(self._branch, version), version))
        return None if found is None else found.digest

    def settle(self, version: int, digest: str) -> bool:
        """Record that weights were published as `version`. True: they differ from the recorded ones, so that a new
        branch was opened, which begins with them."""
        recorded = self.digest(version)
        if recorded == digest:
            return False
        if recorded is None:
            self._write(self._version(self._owner(self._branch, version), version, digest))
            return False
        fork = self._fork(version)
        self._write(fork, self._version(fork.branch, version, digest))
        self._branch = fork.branch
        return True

    def open_branch(self, first_version: int) -> int:
        """Open a branch whose first own version is `first_version`, whatever weights that will be, and make it the
        current one: after a roll-back by the gate. Return its number."""
        fork = self._fork(first_version)
        self._write(fork)
        self._branch = fork.branch
        return fork.branch

    def shares(self, branch: int, version: int) -> bool:
        """Whether `version` is the same one on `branch` and on the current branch."""
        return self._owner(branch, version) == self._owner(self._branch, version)

    def fork_distance(self, shard_branch: int, step: int) -> int:
        """Steps from the last version that `shard_branch` and the current branch share to `step`; 0 on one branch."""
        if shard_branch == self._branch:
            return 0
        return max(0, step - (self._first_difference(shard_branch) - 1))

    def _first_difference(self, other: int) -> int:
        """The first version that is not the same on `other` and on the current branch, which are two."""
        limits = dict(self._ancestors(self._branch))
        return next(min(limit, limits[one]) for one, limit in self._ancestors(other) if one in limits)

    def _ancestors(self, branch: int) -> Iterator[tuple[int, int]]:
        """The branch and those that it came from, each with the first version that is no longer shared with it."""
        self._check(branch)
        limit = sys.maxsize
        yield branch, limit
        while branch in self._forks:
            limit = min(limit, self._forks[branch].fork)
            branch = self._forks[branch].parent
            yield branch, limit

    def _owner(self, branch: int, version: int) -> int:
        self._check(branch)
        while branch in self._forks and version < self._forks[branch].fork:
            branch = self._forks[branch].parent
        return branch

    def _check(self, branch: int) -> None:
        if branch != FIRST_BRANCH and branch not in self._forks:
            raise LedgerError(
                f"branch {branch} is not in {self._path}, which has {[FIRST_BRANCH, *self._forks]}. "
                "The file is only ever added to: restore it from a copy."
            )

    def _fork(self, first_version: int) -> Fork:
        parent = self._owner(self._branch, first_version - 1)
        number = max(self._forks, default=FIRST_BRANCH) + 1
        return Fork(branch=number, parent=parent, fork=first_version, attempt=self._attempt)

    def _version(self, branch: int, version: int, digest: str) -> Version:
        return Version(branch=branch, version=version, digest=digest, attempt=self._attempt)

    def _take(self, line: Version | Fork) -> None:
        """Learn what a line of the file says. Raises ValueError when it contradicts an earlier one."""
        if isinstance(line, Fork):
            if line.branch == FIRST_BRANCH or line.branch in self._forks:
                raise ValueError(f"branch {line.branch} begins twice")
            if line.parent not in (FIRST_BRANCH, *self._forks):
                raise ValueError(f"its parent {line.parent} is not known")
            self._forks[line.branch] = line
            self._branch = line.branch
            return
        if line.branch not in (FIRST_BRANCH, *self._forks):
            raise ValueError(f"branch {line.branch} is not known")
        known = self._versions.setdefault((line.branch, line.version), line)
        if known.digest != line.digest:
            raise ValueError(f"version {line.version} of branch {line.branch} is recorded with another digest")
        if self._owner(self._branch, line.version) != line.branch:
            self._branch = line.branch

    def _write(self, *lines: Version | Fork) -> None:
        is_new = not self._path.exists()
        with self._path.open("ab+") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(b"".join(json.dumps(line.model_dump()).encode() + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            fsync(self._path.parent)
        for line in lines:
            self._take(line)


def fits(lineage: Lineage, origin: ShardOrigin, *, sampling_hash: str, max_staleness: int) -> str | None:
    """None: the shard may serve its step on the current branch. Else why not, in one line.

    Weights "" (loaded from disk, never sent) conflict with nothing, nor do versions of its own line that the lineage
    has not recorded. A shard of another branch is judged by its fork before the current branch has come so far.

    Args:
        sampling_hash: what a shard sampled today would carry; "" is compared with nothing.
        max_staleness: steps.
    """
    if (reason := other_sampling(origin, sampling_hash)) is not None:
        return reason
    if not _is_known(lineage, origin.branch):
        return f"its branch {origin.branch} is not in the lineage, which ends with branch {_last_branch(lineage)}"
    conflicts = _conflicts(lineage, origin)
    if not conflicts:
        return None
    step = origin.chunk.step
    # Weights that were never recorded before their trainer died differ on one branch too.
    distance = max(lineage.fork_distance(origin.branch, step), step - (conflicts[0] - 1))
    if distance <= max_staleness:
        return None
    return (
        f"version {conflicts[0]} of branch {origin.branch} has other weights than that of branch {lineage.branch}; "
        f"step {step} is {distance} past the last that they share, max_staleness is {max_staleness}"
    )


def other_sampling(origin: ShardOrigin, sampling_hash: str) -> str | None:
    """None: sampled with the same settings and data, as far as is recorded. Else the reason, in one line."""
    if "" in (origin.sampling_hash, sampling_hash) or origin.sampling_hash == sampling_hash:
        return None
    return f"sampled with other settings or data: hash {_start(origin.sampling_hash)}, expected {_start(sampling_hash)}"


def is_off_policy(lineage: Lineage, origin: ShardOrigin) -> bool:
    """Whether a token of the shard was written by weights that are not the current branch's, as far as is known."""
    if not _is_known(lineage, origin.branch):
        return True
    return bool(_conflicts(lineage, origin))


def _conflicts(lineage: Lineage, origin: ShardOrigin) -> list[int]:
    """Versions, ascending, whose weights on the current branch are not those which wrote the shard.

    Where the current branch has not come to a version yet, only a shard of its own line can have its weights.
    """

    def is_other(version: int, digest: str) -> bool:
        recorded = lineage.digest(version)
        return not lineage.shares(origin.branch, version) if recorded is None else recorded != digest

    return sorted(version for version, digest in origin.weight_hashes.items() if digest and is_other(version, digest))


def _is_known(lineage: Lineage, branch: int) -> bool:
    return branch in (FIRST_BRANCH, *(fork.branch for fork in lineage.forks))


def _last_branch(lineage: Lineage) -> int:
    return lineage.forks[-1].branch if lineage.forks else FIRST_BRANCH


def _start(digest: str) -> str:
    return f"{digest[:_SHOWN_DIGITS]}…" if len(digest) > _SHOWN_DIGITS else digest


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def _shortened(text: bytes) -> str:
    shown = repr(text.decode(errors="replace"))
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


def _reason(error: ValueError) -> str:
    return error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
