"""Score the rollouts of a run again: a second file of scores beside each shard, the first ones stay as they are.

A second file is named after the code, the weights and the limits that gave it, so what is scored already is not scored
again: a scoring that was killed goes on where it was.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from towline.launcher.score.sample import EarlierScore, Sample
from towline.rollout.grading import Grader
from towline.storage.errors import InputError, LedgerError, RunFolderError
from towline.storage.ledger import ScoreSheet, Shard, read_scores, scores_path, seal_scores, sealed_chunks, sealed_steps
from towline.storage.records import Score
from towline.storage.run_directory import RunDirectory
from towline.storage.set_aside import examine, set_aside


def scoring_name(code_hash: str, weights: Mapping[str, float], limit_s: float, memory_gib: float) -> str:
    """With other limits, other completions run out of time or memory."""
    what = json.dumps([code_hash, sorted(weights.items()), limit_s, memory_gib])
    return hashlib.blake2b(what.encode(), digest_size=8).hexdigest()


def sealed_shards(run: RunDirectory) -> list[Path]:
    """In canonical order."""
    shards = [path for step in sealed_steps(run.rollouts) for path in sealed_chunks(run.rollouts, step)]
    if not shards:
        raise InputError(f"{run.root.name} has no sealed rollouts yet.")
    return shards


class Rescoring:
    def __init__(self, run: RunDirectory, grader: Grader, name: str) -> None:
        """
        Args:
            name: of this scoring, as `scoring_name` gives it.
        """
        self.num_scored = 0
        """Shards."""
        self.num_kept = 0
        """Shards that this scoring had scored before."""
        self.damage: list[str] = []
        """Files that cannot be read, and why."""
        self._run, self._grader, self._name = run, grader, name
        if not os.access(run.rollouts, os.W_OK | os.X_OK):
            raise RunFolderError(
                f"{run.rollouts} is not a folder that you may write to, and scores go beside their shards. "
                "--dry-run writes nothing."
            )

    def samples(self, on_progress: Callable[[float], None]) -> Iterator[Sample]:
        """Score what is not scored, and give every completion with its first scores as the earlier ones.

        Args:
            on_progress: takes the number of shards that are done, a part of one included.
        """
        for number, path in enumerate(sealed_shards(self._run)):
            on_progress(number)
            found = examine(self._run.rollouts, path)
            if found.damage is not None and not found.damage[0].exists():
                continue  # set aside by the run while we look
            if found.damage is not None:
                self.damage.append(f"{found.damage[0].relative_to(self._run.root)}: {found.damage[1]}")
            if found.shard is not None:
                sheet = self._sheet(path, found.shard, lambda share, done=number: on_progress(done + share))
                yield from shard_samples(found.shard, sheet, found.sheet)

    def _sheet(self, path: Path, shard: Shard, on_progress: Callable[[float], None]) -> ScoreSheet:
        if (kept := self._kept(path, shard)) is not None:
            self.num_kept += 1
            return kept
        sheet = self._grader.sheet(shard, lambda done, total: on_progress(done / max(1, total)))
        self._seal(path, sheet)
        self.num_scored += 1
        return sheet

    def _kept(self, path: Path, shard: Shard) -> ScoreSheet | None:
        """What an earlier call left. Scores that are damaged, or of a shard that was replaced, are set aside."""
        place = scores_path(path, self._name)
        if not place.exists():
            return None
        try:
            sheet = read_scores(path, self._name)
        except LedgerError as error:
            reason = str(error)
        else:
            if sheet.shard_digest == shard.digest:
                return sheet
            reason = "given to another shard"
        set_aside(self._run, place, reason, max(0, self._run.attempts - 1))
        return None

    def _seal(self, path: Path, sheet: ScoreSheet) -> None:
        with contextlib.suppress(FileExistsError):  # by another `towline score`: the same code gave the same
            try:
                seal_scores(path, sheet, self._name)
            except FileNotFoundError:  # a run that begins or ends clears away what is half-written in its ledger
                seal_scores(path, sheet, self._name)


def shard_samples(shard: Shard, sheet: ScoreSheet, first: ScoreSheet | None) -> Iterator[Sample]:
    earlier = iter(first.scores) if first is not None else None
    scores = iter(sheet.scores)
    for group in shard.groups:
        for number, completion in enumerate(group.completions):
            yield Sample(
                where=place(shard, group.prompt.row, number),
                prompt=group.prompt.row,
                completion=completion.text,
                gold=group.prompt.answer,
                score=next(scores),
                earlier=_earlier(next(earlier)) if earlier is not None else None,
            )


def place(shard: Shard, row: int, number: int) -> str:
    chunk = shard.origin.chunk
    return f"step {chunk.step}{f' wave {chunk.wave}' if chunk.wave else ''} row {row} sample {number}"


def _earlier(score: Score) -> EarlierScore:
    return EarlierScore(parts=score.parts, total=score.total)
