"""What the held-out prompts say about a run: each one right or wrong, before and after, read from the ledger."""

from towline.rollout.evaluation.statistics import Interval, accuracy_interval, paired_difference
from towline.storage.ledger import read_scored_shard, sealed_chunks
from towline.storage.records import ScoreStatus
from towline.storage.run_directory import RunDirectory, read_jsonl


def evaluated_versions(run: RunDirectory) -> list[int]:
    return sorted({row["version"] for row in read_jsonl(run.evaluations)})


def right_by_row(run: RunDirectory, version: int) -> dict[int, bool]:
    """Dataset row → whether its completion was right. A prompt whose grading failed is left out."""
    right: dict[int, bool] = {}
    for path in sealed_chunks(run.held_out, version):
        shard, sheet = read_scored_shard(path)
        rows = [group.prompt.row for group in shard.groups for _ in group.completions]
        graded = zip(rows, sheet.scores, strict=True)
        right |= {row: score.total == 1.0 for row, score in graded if score.status is ScoreStatus.OK}
    return right


def held_out_summary(run: RunDirectory) -> str | None:
    """Accuracy before → after with the interval of the difference on the same prompts; None without evaluations."""
    versions = evaluated_versions(run)
    if not versions:
        return None
    before, after = right_by_row(run, versions[0]), right_by_row(run, versions[-1])
    rows = sorted(before.keys() & after.keys())
    if not rows:
        return None
    first = _accuracy([before[row] for row in rows])
    if len(versions) == 1:
        return f"{first} at version {versions[0]}, {len(rows)} prompts"
    last = _accuracy([after[row] for row in rows])
    change = paired_difference([before[row] for row in rows], [after[row] for row in rows])
    return (
        f"{first.estimate:.3f} → {last.estimate:.3f}   difference {change.estimate:+.3f} "
        f"({change.low:+.3f} to {change.high:+.3f}), {len(rows)} prompts"
    )


def _accuracy(right: list[bool]) -> Interval:
    return accuracy_interval(sum(right), len(right))
