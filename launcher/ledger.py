"""`towline ledger`: what a run holds, step by step, which weights wrote it, and what may not be read and why.

Every file is read whole and compared with the digest it was sealed with; nothing is changed.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import track

from towline.launcher.text import printable
from towline.storage.ledger import ScoreSheet, Shard, sealed_chunks, sealed_steps
from towline.storage.lineage import FIRST_BRANCH, Lineage, is_off_policy
from towline.storage.records import ScoreStatus
from towline.storage.run_directory import RunDirectory, is_locked
from towline.storage.set_aside import SetAside, examine, list_aside, orphans, run_leftovers

_LONG = 100
"""Shards; reading fewer needs no bar."""


@dataclass(slots=True)
class StepSummary:
    """Counts over the shards of one step; of a damaged shard only that it is there."""

    step: int
    shards: int = 0
    scored: int = 0
    damaged: int = 0
    groups: int = 0
    completions: int = 0
    tokens: int = 0
    failed: int = 0
    """Completions whose grading failed."""
    off_policy: int = 0
    """Shards written by weights of another branch."""
    last_wave: int = 0
    isolations: set[str] = field(default_factory=set[str])
    """What shut in the programs that rewards ran."""
    versions: dict[int, set[int]] = field(default_factory=dict[int, set[int]])
    """Branch → versions that wrote a token."""

    def add(self, shard: Shard, sheet: ScoreSheet | None, *, off_policy: bool) -> None:
        completions = [completion for group in shard.groups for completion in group.completions]
        self.groups += len(shard.groups)
        self.completions += len(completions)
        self.tokens += sum(len(completion.token_ids) for completion in completions)
        self.off_policy += off_policy
        self.last_wave = max(self.last_wave, shard.origin.chunk.wave)
        self.versions.setdefault(shard.origin.branch, set()).update(shard.origin.weight_hashes)
        if sheet is not None:
            self.scored += 1
            self.isolations |= {sheet.isolation} - {""}
            self.failed += sum(score.status is not ScoreStatus.OK for score in sheet.scores)


@dataclass(frozen=True, slots=True)
class Damage:
    path: str
    """Relative to the run folder."""
    reason: str


def print_ledger(run: RunDirectory) -> int:
    """Return 1 when a file is damaged, else 0."""
    lineage = Lineage.open(run, attempt=run.attempts)
    rollouts, damage = _summaries(run, run.rollouts, lineage)
    held_out, more = _summaries(run, run.held_out, lineage)
    damage += more
    print("\n".join(_lines(run, lineage, rollouts, held_out, damage)))
    return 1 if damage else 0


def _summaries(run: RunDirectory, folder: Path, lineage: Lineage) -> tuple[list[StepSummary], list[Damage]]:
    """Read every shard under `folder`, with a bar on a terminal when they are many."""
    places = [(step, path) for step in sealed_steps(folder) for path in sealed_chunks(folder, step)]
    steps: dict[int, StepSummary] = {}
    damage: list[Damage] = []
    console = Console(stderr=True)
    is_quiet = len(places) < _LONG or not console.is_terminal
    for step, path in track(places, "reading shards", console=console, transient=True, disable=is_quiet):
        found = examine(folder, path)
        if found.damage is not None and not found.damage[0].exists():
            # Set aside by the run while we look.
            continue
        summary = steps.setdefault(step, StepSummary(step))
        summary.shards += 1
        if found.shard is not None:
            summary.add(found.shard, found.sheet, off_policy=is_off_policy(lineage, found.shard.origin))
        if found.damage is not None:
            summary.damaged += 1
            damage.append(Damage(_relative(run, found.damage[0]), found.damage[1]))
    damage += [Damage(_relative(run, path), "its shard is gone") for path in orphans(folder)]
    return list(steps.values()), damage


def _lines(
    run: RunDirectory,
    lineage: Lineage,
    rollouts: Sequence[StepSummary],
    held_out: Sequence[StepSummary],
    damage: Sequence[Damage],
) -> Iterator[str]:
    yield f"{run.root.name}  {_total(rollouts)}"
    if rollouts:
        yield from _table("step", rollouts)
    if held_out:
        yield ""
        yield f"held-out  {_total(held_out)}"
        yield from _table("version", held_out)
    yield from _isolation_lines([*rollouts, *held_out])
    yield ""
    yield from _lineage_lines(lineage)
    yield ""
    yield from _aside_lines(list_aside(run))
    yield from _leftover_lines(run)
    yield from _damage_lines(damage)


def _total(steps: Sequence[StepSummary]) -> str:
    return (
        f"{sum(step.shards for step in steps):,} shards of {len(steps):,} steps, "
        f"{sum(step.completions for step in steps):,} completions, {sum(step.tokens for step in steps):,} tokens"
    )


def _table(first: str, steps: Sequence[StepSummary]) -> Iterator[str]:
    yield f"{first:>8}  shards  scored  groups  completions       tokens  failed  versions"
    for step in steps:
        yield (
            f"{step.step:>8}  {step.shards:>6}  {step.scored:>6}  {step.groups:>6}  {step.completions:>11,}  "
            f"{step.tokens:>11,}  {step.failed:>6}  {_versions_text(step.versions)}{_marks(step)}"
        ).rstrip()


def _isolation_lines(steps: Sequence[StepSummary]) -> Iterator[str]:
    isolations = sorted({isolation for step in steps for isolation in step.isolations})
    if isolations:
        yield ""
        yield f"programs  ran behind {'; '.join(printable(isolation) for isolation in isolations)}"


def _versions_text(versions: dict[int, set[int]]) -> str:
    """v3 to v5, v6 of branch 1"""
    return ", ".join(
        f"{_range(sorted(versions[branch]))}{'' if branch == FIRST_BRANCH else f' of branch {branch}'}"
        for branch in sorted(versions)
        if versions[branch]
    )


def _range(versions: Sequence[int]) -> str:
    first, last = versions[0], versions[-1]
    return f"v{first}" if first == last else f"v{first} to v{last}"


def _marks(step: StepSummary) -> str:
    waves = f"  {step.last_wave + 1} waves" if step.last_wave else ""
    off_policy = f"  {step.off_policy} off-policy" if step.off_policy else ""
    damaged = f"  {step.damaged} DAMAGED" if step.damaged else ""
    return waves + off_policy + damaged


def _lineage_lines(lineage: Lineage) -> Iterator[str]:
    yield f"lineage  branch {FIRST_BRANCH}{_recorded(lineage, FIRST_BRANCH)}"
    for fork in lineage.forks:
        yield (
            f"         branch {fork.branch} leaves branch {fork.parent} at v{fork.fork}, attempt {fork.attempt}"
            f"{_recorded(lineage, fork.branch)}"
        )


def _recorded(lineage: Lineage, branch: int) -> str:
    versions = lineage.versions(branch)
    weights = f"  weights of {_range(versions)} recorded" if versions else "  no weights recorded"
    return weights + ("  (current)" if branch == lineage.branch and lineage.forks else "")


def _aside_lines(entries: Sequence[SetAside]) -> Iterator[str]:
    """What a model or a file name cannot influence is printed as it is; a reason may quote a damaged file."""
    if not entries:
        yield "aside    nothing"
        return
    yield f"aside    {len(entries)} kept and never read"
    for entry in entries:
        when = "" if entry.when is None else f", {time.strftime('%Y-%m-%d %H:%M', time.localtime(entry.when))}"
        attempt = "" if entry.attempt is None else f"attempt {entry.attempt}{when}: "
        yield f"  {printable(entry.aside)}"
        yield f"    {attempt}{printable(entry.reason)}"


def _leftover_lines(run: RunDirectory) -> Iterator[str]:
    files = run_leftovers(run)
    if not files:
        return
    is_live = is_locked(run)
    yield (
        f"{'writing' if is_live else 'left':<7}  {len(files)} half-written {'file' if len(files) == 1 else 'files'}"
        + ("" if is_live else " of killed writers; the next attempt removes them")
    )
    for path in files:
        yield f"  {printable(_relative(run, path))}"


def _damage_lines(damage: Sequence[Damage]) -> Iterator[str]:
    if not damage:
        return
    yield ""
    yield f"DAMAGED  {len(damage)} {'file' if len(damage) == 1 else 'files'}; the next attempt sets aside what it needs"
    for one in damage:
        yield f"  {printable(one.path)}"
        yield f"    {printable(one.reason)}"


def _relative(run: RunDirectory, path: Path) -> str:
    return path.relative_to(run.root).as_posix()
