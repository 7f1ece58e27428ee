"""The scorer: waits for sealed shards, grades their completions in killable workers, seals the scores beside them."""

import contextlib
import sys
import time
from pathlib import Path

from towline.jobs.asked_waves import asked_chunks
from towline.jobs.role import Role, run_role
from towline.jobs.work import Workload, evaluation_work, training_work
from towline.rollout.grading import Grader
from towline.rollout.score_timings import ScoreTimings
from towline.storage.ledger import ScoreSheet, read_scores, read_shard, scores_path, seal_scores
from towline.storage.records import ChunkId, ScoreStatus
from towline.storage.set_aside import set_aside

_IDLE_S = 0.02


def score_run(role: Role, number: int) -> None:
    """
    Args:
        number: which of the scorers this is; each grades its share of a step's chunks.
    """
    workloads = [
        work for work in (training_work(role.circle, role.run), evaluation_work(role.circle, role.run)) if work
    ]
    graders = {work.name: _grader(role, work) for work in workloads}
    try:
        done: set[tuple[str, ChunkId]] = set()
        while not role.is_finished:
            for work in workloads:
                for chunk in _due(role, work):
                    is_mine = chunk.chunk % role.circle.num_scorers == number
                    if not is_mine or (work.name, chunk) in done:
                        continue
                    if role.store.get(f"{work.name}/sealed/{chunk}") is None:
                        continue
                    role.heartbeat.beat("score")
                    score_chunk(role, work, chunk, graders[work.name])
                    done.add((work.name, chunk))
            role.heartbeat.beat("wait for shards")
            time.sleep(_IDLE_S)
    finally:
        for name, grader in graders.items():
            grader.close()
            for line in grader.timings.lines():
                _say(f"{name}: {line}")


def score_chunk(role: Role, work: Workload, chunk: ChunkId, grader: Grader) -> None:
    """Score one shard and announce it. Scores of an earlier attempt stand if the same code gave them."""
    path = work.path(chunk)
    shard = read_shard(path)
    if not _has_scores(role, path, shard.digest, grader):
        sheet = grader.sheet(
            shard, on_progress=lambda done, total: role.heartbeat.beat(), where=f"{work.name} {chunk}, "
        )
        with contextlib.suppress(FileExistsError):  # by a scorer that was taken for dead; the same code gave the same
            seal_scores(path, sheet)
        _say(_chunk_line(work, chunk, sheet))
    role.store.set(f"{work.name}/scored/{chunk}", grader.code_hash)


def _say(line: str) -> None:
    """For people. On a full disk whoever cannot seal a file ends the run and says why, not a line of a log."""
    with contextlib.suppress(OSError):
        print(line, flush=True)


def _has_scores(role: Role, path: Path, digest: str, grader: Grader) -> bool:
    if not scores_path(path).exists():
        return False
    sheet = read_scores(path)
    if (sheet.code_hash, sheet.shard_digest, sheet.weights) == (grader.code_hash, digest, grader.weights):
        return True
    set_aside(role.run, scores_path(path), "given by other reward code, weights, or to another shard", role.attempt)
    return False


def _chunk_line(work: Workload, chunk: ChunkId, sheet: ScoreSheet) -> str:
    timings = ScoreTimings()
    for score in sheet.scores:
        timings.add(score, "", "")
    num_failed = sum(score.status is not ScoreStatus.OK for score in sheet.scores)
    failed = f", {num_failed} failed" if num_failed else ""
    times = "; ".join(f"{part} {latency}" for part, latency in timings.latencies().items())
    seconds = sheet.ended - sheet.began
    return f"{work.name} {chunk}: {len(sheet.scores)} completions in {seconds:.2f} s{failed}   {times}"


def _due(role: Role, work: Workload) -> list[ChunkId]:
    """Chunks that may have been sealed: of the steps that engines may be working on."""
    if work.name == "held_out":
        request = role.store.get("evaluate")
        return [] if request is None else [chunk for chunk, _ in work.chunks(request["version"])]
    start = role.store.get("start")
    if start is None:
        return []
    at = role.store.get("training") or start["step"]
    ahead = range(at, min(at + role.circle.rollout.max_staleness + 1, role.circle.steps))
    return [chunk for step in ahead for chunk, _ in asked_chunks(role.store, work, step)]


def _grader(role: Role, work: Workload) -> Grader:
    grader = Grader(
        work.rewards,
        max_completion_tokens=work.max_completion_tokens,
        num_workers=role.circle.local.scorers,
        limit_s=role.circle.scoring.limit_s,
        folder=role.run.root,
        memory_gib=role.circle.scoring.memory_gib,
    )
    if grader.why_slow_starts:
        print(f"! {work.name}: {grader.why_slow_starts}", flush=True)
    if grader.isolation:
        print(f"{work.name}: programs run behind {grader.isolation}", flush=True)
    return grader


def main() -> None:
    number = int(sys.argv[1])
    run_role(f"scorer.{number}", lambda role: score_run(role, number))


if __name__ == "__main__":
    main()
