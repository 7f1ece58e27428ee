"""Engines and scorers serve a step's first wave by themselves, and further ones when they are asked for."""

from types import SimpleNamespace

import pytest

from towline.jobs.asked_waves import ask_for_waves, asked_chunks
from towline.jobs.leases import free_leases
from towline.jobs.rollout_role import _Worker
from towline.jobs.scorer_role import _due, score_chunk
from towline.jobs.work import Workload, training_work
from towline.rollout.grading import Grader
from towline.rollout.scripted_engine import ScriptedEngine
from towline.storage.ledger import read_scored_shard, read_shard
from towline.storage.records import ChunkId
from towline.storage.schedule import sampling_seed


@pytest.fixture
def experiment(make_experiment):
    """Two prompts a wave in two chunks, three waves at most; engines may be one step ahead."""
    return make_experiment(
        rollout={"prompts_per_step": 2, "chunk_prompts": 1, "max_waves": 3, "max_staleness": 1, "engine": "scripted"}
    )


@pytest.fixture
def work(experiment, run) -> Workload:
    return training_work(experiment, run)


@pytest.fixture
def role(experiment, run, store):
    """What engine and scorer use of their role."""
    return SimpleNamespace(
        experiment=experiment, circle=experiment, run=run, store=store, attempt=0, is_stopping=False,
        heartbeat=SimpleNamespace(beat=lambda: None),
    )  # fmt: skip


def engine(role, work: Workload, number: int) -> _Worker:
    role = SimpleNamespace(**vars(role), process=f"rollout.{number}", life=0)
    subscriber = SimpleNamespace(has_weights=True, branch=0, digests={0: ""})
    tokenizer = SimpleNamespace(encode=lambda text: [5, 6], decode=lambda ids: f"{ids}", stop_token_ids=[])
    script = ScriptedEngine(lambda request: [request.seed % 7, request.seed % 5])
    return _Worker(role, number, script, subscriber, work, None, {work.name: tokenizer})


def serve(*workers: _Worker) -> list[str]:
    """Let engines work in turns until there is nothing to do; return the chunks that were announced meanwhile."""
    store = workers[0].role.store
    before = set(store.values)
    for _ in range(10):
        for worker in workers:
            worker.lease()
            worker.step()
    return sorted(name.removeprefix("rollouts/sealed/") for name in set(store.values) - before if "/sealed/" in name)


def names(step: int, *waves: int) -> list[str]:
    return [f"step-{step:06d}/wave-{wave}/chunk-{chunk:03d}" for wave in waves for chunk in range(2)]


def test_only_the_first_wave_is_served_unasked(work: Workload, store):
    assert [str(chunk) for chunk, _ in asked_chunks(store, work, 1)] == names(1, 0)
    ask_for_waves(store, work, 1, 3)
    assert [str(chunk) for chunk, _ in asked_chunks(store, work, 1)] == names(1, 0, 1, 2)
    assert asked_chunks(store, work, 2) == work.chunks(2)


def test_an_engine_serves_a_wave_once_it_is_asked_for(role, work: Workload, store):
    store.set("start", {"step": 0})
    worker = engine(role, work, 0)
    assert serve(worker) == names(0, 0) + names(1, 0)
    assert serve(worker) == []
    ask_for_waves(store, work, 0, 2)
    assert serve(worker) == names(0, 1)
    ask_for_waves(store, work, 0, 3)
    assert serve(worker) == names(0, 2)
    assert not (role.run.rollouts / "step-000001" / "wave-1").exists()


def test_a_wave_has_rows_and_seeds_of_its_own(role, work: Workload, store):
    store.set("start", {"step": 0})
    ask_for_waves(store, work, 0, 2)
    serve(engine(role, work, 0))
    for wave in range(2):
        for chunk, rows in work.chunks(0, wave):
            groups = read_shard(work.path(chunk)).groups
            assert tuple(group.prompt.row for group in groups) == rows
            assert [[one.seed for one in group.completions] for group in groups] == [
                [sampling_seed(0, 0, wave, row, sample) for sample in range(2)] for row in rows
            ]


def test_two_engines_share_a_wave_and_leave_what_one_would(role, work: Workload, store, tmp_path):
    store.set("start", {"step": 0})
    ask_for_waves(store, work, 0, 3)
    workers = [engine(role, work, number) for number in range(2)]
    # One chunk at a time, so that both have some.
    for worker in workers:
        worker.role.circle = worker.role.circle.model_copy(
            update={"rollout": worker.role.circle.rollout.model_copy(update={"max_sequences": 2})}
        )
    serve(*workers)
    shards = [read_shard(work.path(chunk)) for chunk, _ in asked_chunks(store, work, 0)]
    assert {shard.origin.engine for shard in shards} == {0, 1}
    assert [shard.origin.chunk.wave for shard in shards] == [0, 0, 1, 1, 2, 2]
    assert all(one.token_ids.tolist() == [one.seed % 7, one.seed % 5]
               for shard in shards for group in shard.groups for one in group.completions)  # fmt: skip


def test_a_chunk_of_a_further_wave_that_a_dead_engine_held_goes_to_another(role, work: Workload, store):
    store.set("start", {"step": 0})
    dead, other = engine(role, work, 0), engine(role, work, 1)
    serve(dead)
    ask_for_waves(store, work, 0, 2)
    dead.lease()
    assert [str(flight.chunk) for _, flight in dead.in_flight] == names(0, 1)
    assert serve(other) == []
    assert free_leases(store, "rollout.0", 0)[0] == [f"lease/rollouts/{name}" for name in names(0, 1)]
    assert serve(other) == names(0, 1)


def test_an_earlier_attempt_s_wave_is_announced_only_where_it_is_asked_for_again(role, work: Workload, store, run):
    store.set("start", {"step": 0})
    ask_for_waves(store, work, 0, 2)
    serve(engine(role, work, 0))
    store.values.clear()
    store.set("start", {"step": 0})
    assert serve(engine(role, work, 0)) == names(0, 0) + names(1, 0)
    ask_for_waves(store, work, 0, 2)
    assert serve(engine(role, work, 0)) == names(0, 1)


def test_the_scorer_looks_at_asked_waves_and_scores_them(role, work: Workload, store, run):
    store.set("start", {"step": 0})
    assert [str(chunk) for chunk in _due(role, work)] == names(0, 0) + names(1, 0)
    ask_for_waves(store, work, 0, 2)
    assert [str(chunk) for chunk in _due(role, work)] == names(0, 0, 1) + names(1, 0)
    serve(engine(role, work, 0))
    chunk = ChunkId(step=0, wave=1, chunk=1)
    grader = Grader(work.rewards, max_completion_tokens=4, num_workers=1, limit_s=5.0, folder=run.root)
    try:
        score_chunk(role, work, chunk, grader)
    finally:
        grader.close()
    assert store.get(f"rollouts/scored/{chunk}") == grader.code_hash
    _, sheet = read_scored_shard(work.path(chunk))
    assert [one.parts for one in sheet.scores] == [{"exact_match": 0.0}] * 2
