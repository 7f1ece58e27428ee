"""A chunk that is given up is there for every reader, without groups."""

from towline.jobs.lost_chunks import give_up
from towline.jobs.work import training_work
from towline.storage.ledger import ScoreSheet, read_scored_shard, read_shard, seal_scores, seal_shard
from towline.storage.records import ChunkId, ShardOrigin


def test_it_is_sealed_empty_under_its_name_and_announced(run, store, make_experiment):
    chunk = ChunkId(step=2, wave=0, chunk=1)
    work = training_work(make_experiment(), run)
    give_up(run, store, work.lease(chunk), attempt=3)
    shard = read_shard(work.path(chunk))
    assert (shard.groups, shard.origin.chunk, shard.origin.attempt, shard.origin.engine) == ((), chunk, 3, -1)
    assert store.values == {f"rollouts/sealed/{chunk}": shard.digest}


def test_an_evaluation_s_chunk_is_given_up_in_its_own_folder(run, store):
    give_up(run, store, "lease/held_out/step-000004/wave-0/chunk-000", attempt=0)
    path = run.held_out / "step-000004/wave-0/chunk-000.h5"
    assert store.values == {"held_out/sealed/step-000004/wave-0/chunk-000": read_shard(path).digest}
    assert not run.rollouts.exists()


def test_what_an_engine_sealed_in_its_last_moment_counts(run, store):
    chunk = ChunkId(step=0, wave=0, chunk=0)
    sealed = ShardOrigin(chunk=chunk, branch=0, engine=1, attempt=0, weight_hashes={0: "ab"}, sampling={}, began=1.0,
                         ended=2.0)  # fmt: skip
    digest = seal_shard(run.chunk(chunk), (), sealed)
    give_up(run, store, f"lease/rollouts/{chunk}", attempt=0)
    assert store.values == {f"rollouts/sealed/{chunk}": digest}
    assert read_shard(run.chunk(chunk)).origin == sealed


def test_it_can_be_scored_and_read_with_its_scores(run, store):
    chunk = ChunkId(step=0, wave=0, chunk=0)
    give_up(run, store, f"lease/rollouts/{chunk}", attempt=0)
    score_nothing(run.chunk(chunk))
    shard, sheet = read_scored_shard(run.chunk(chunk))
    assert (shard.groups, sheet.scores) == ((), ())


def score_nothing(path) -> None:
    sheet = ScoreSheet(scores=(), weights={"exact_match": 1.0}, code_hash="0", shard_digest=read_shard(path).digest,
                       began=1.0, ended=1.0)  # fmt: skip
    seal_scores(path, sheet)
