"""What every engine promises, shown of each implementation. vLLM is started once for the module, on the tiny model."""

import dataclasses
import itertools
import os
import random
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from towline.rollout.engine import Engine, Generated, GenerationRequest
from towline.rollout.scripted_engine import ScriptedEngine
from towline.rollout.transfer_group import Membership, TransferGroup
from towline.storage.errors import TransferError
from towline.storage.records import FinishReason
from towline.storage.weight_stream import JoinRequest, StreamHeader, TensorMeta

MODEL = Path(__file__).parents[2] / "models" / "tiny-sort"
VOCABULARY = 49
MAX_SEQUENCES = 4
PROMPT = [5, 9, 2, 14, 30, 7]
LONG_PROMPT = 20 * PROMPT
"""Shorter ones than a block of the KV cache are never found in it."""
NAMES = itertools.count()


def scripted() -> ScriptedEngine:
    def script(request: GenerationRequest) -> list[int]:
        choose = random.Random(repr((request.prompt_token_ids, request.seed)))
        return [choose.randrange(VOCABULARY) for _ in range(request.max_tokens)]

    return ScriptedEngine(script)


def vllm() -> Engine:
    if not MODEL.is_dir():
        pytest.skip(f"{MODEL} is not there; bash env/setup.sh makes it")
    from towline.rollout.vllm_engine import VllmEngine

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports use what torch has deprecated
        return VllmEngine(MODEL, precision="float32", max_context_tokens=256, max_sequences=MAX_SEQUENCES)


@pytest.fixture(scope="module", params=["scripted", pytest.param("vllm", marks=pytest.mark.slow)])
def started(request: pytest.FixtureRequest) -> Iterator[Engine]:
    environment = dict(os.environ)
    engine = {"scripted": scripted, "vllm": vllm}[request.param]()
    yield engine
    engine.close()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def engine(started: Engine) -> Iterator[Engine]:
    assert started.num_unfinished == 0
    yield started
    assert started.num_unfinished == 0, "a test left requests behind"


def make_request(seed: int = 0, *, max_tokens: int = 12, stop: tuple[int, ...] = ()) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"request-{next(NAMES)}",
        prompt_token_ids=PROMPT,
        seed=seed,
        temperature=2.0,  # the tiny model is sure of itself
        max_tokens=max_tokens,
        stop_token_ids=list(stop),
    )


def long_request(seed: int) -> GenerationRequest:
    return dataclasses.replace(make_request(seed), prompt_token_ids=LONG_PROMPT)


def drain(engine: Engine) -> dict[str, Generated]:
    finished: list[Generated] = []
    deadline = time.monotonic() + 60
    while engine.num_unfinished:
        finished += engine.step()
        assert time.monotonic() < deadline
    assert len({one.request_id for one in finished}) == len(finished), "a request came twice"
    return {one.request_id: one for one in finished}


def generate(engine: Engine, *requests: GenerationRequest) -> list[Generated]:
    for request in requests:
        engine.submit(request)
    finished = drain(engine)
    assert set(finished) == {request.request_id for request in requests}
    return [finished[request.request_id] for request in requests]


def steps(engine: Engine, count: int) -> list[Generated]:
    return [one for _ in range(count) for one in engine.step()]


def test_the_same_seed_gives_the_same_tokens_and_the_same_bits_of_logprobs(engine: Engine):
    first, again = (generate(engine, make_request(3))[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    assert first.logprobs == again.logprobs


def test_after_a_reset_of_the_cache_the_same_seeds_give_the_same_bits_whatever_came_before(engine: Engine):
    def both() -> list[Generated]:
        return generate(engine, long_request(3), long_request(4))

    engine.reset_cache()
    first = both()
    both()  # finds the prompt's keys and values in the cache
    engine.score(LONG_PROMPT[:-1])
    engine.reset_cache()
    again = both()
    assert [one.token_ids for one in first] == [one.token_ids for one in again]
    assert [one.logprobs for one in first] == [one.logprobs for one in again]


def test_nothing_is_found_in_a_cache_that_was_reset(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    inner: Any = getattr(engine, "_engine", None)
    if inner is None:
        pytest.skip("the scripted engine has no cache")
    cached: dict[str, int] = {}
    step = inner.step

    def recording() -> Any:
        outputs = step()
        cached.update({output.request_id: output.num_cached_tokens for output in outputs})
        return outputs

    monkeypatch.setattr(inner, "step", recording)
    engine.reset_cache()
    requests = [long_request(seed) for seed in range(3)]
    generate(engine, requests[0])
    generate(engine, requests[1])
    engine.reset_cache()
    generate(engine, requests[2])
    first, found, after_reset = (cached[request.request_id] for request in requests)
    assert (first, after_reset) == (0, 0)
    assert found > 0


def test_a_reset_of_the_cache_leaves_the_version_alone(engine: Engine):
    before = engine.version
    engine.reset_cache()
    engine.reset_cache()
    assert (engine.version, engine.num_unfinished) == (before, 0)


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(engine: Engine):
    (alone,) = generate(engine, make_request(3))
    beside = generate(engine, make_request(1), make_request(3), make_request(2))
    assert beside[1].token_ids == alone.token_ids
    assert beside[1].logprobs == pytest.approx(alone.logprobs, abs=1e-4)


def test_different_seeds_give_different_tokens(engine: Engine):
    # case G6-12: samples of one prompt; torch's CPU generators look at the lower 32 bits of a seed only
    seeds = [0, 1, 7, 2**40 + 5, 2**63 - 1]
    completions = generate(engine, *(make_request(seed) for seed in seeds))
    assert len({tuple(one.token_ids) for one in completions}) == len(seeds)


def test_every_token_has_one_logprob_and_one_version(engine: Engine):
    for one in generate(engine, make_request(0), make_request(1, max_tokens=1), make_request(2, max_tokens=30)):
        assert len(one.token_ids) == len(one.logprobs) == len(one.versions) >= 1
        assert all(-100 < logprob <= 0 for logprob in one.logprobs)
        assert all(0 <= token < VOCABULARY for token in one.token_ids)
        assert set(one.versions) == {engine.version}


@pytest.mark.parametrize("max_tokens", [1, 2, 12])
def test_a_completion_without_a_stop_token_is_cut_at_its_limit(engine: Engine, max_tokens: int):
    (one,) = generate(engine, make_request(5, max_tokens=max_tokens))
    assert len(one.token_ids) == max_tokens
    assert one.finish_reason is FinishReason.LENGTH


def test_a_stop_token_ends_a_completion_and_is_part_of_it(engine: Engine):
    # case G6-16: ids and log-probs end together, with the stop token as the last
    (free,) = generate(engine, make_request(5))
    unused = next(token for token in range(VOCABULARY) if token not in free.token_ids)
    for stop in set(free.token_ids):
        place = free.token_ids.index(stop)
        (stopped,) = generate(engine, make_request(5, stop=(unused, stop)))
        assert stopped.token_ids == free.token_ids[: place + 1]
        assert stopped.logprobs == free.logprobs[: place + 1]
        assert len(stopped.versions) == place + 1
        assert stopped.finish_reason is FinishReason.STOP


def test_a_stop_token_as_the_very_last_token_is_a_stop(engine: Engine):
    (free,) = generate(engine, make_request(5, max_tokens=1))
    (stopped,) = generate(engine, make_request(5, max_tokens=1, stop=(free.token_ids[0],)))
    assert stopped.finish_reason is FinishReason.STOP


def test_more_requests_than_sequences_all_finish_with_what_they_would_give_alone(engine: Engine):
    requests = [make_request(seed, max_tokens=3 + seed % 5) for seed in range(3 * MAX_SEQUENCES)]
    for request, one in zip(requests, generate(engine, *requests), strict=True):
        assert len(one.token_ids) == request.max_tokens
        (alone,) = generate(engine, make_request(request.seed, max_tokens=request.max_tokens))
        assert one.token_ids == alone.token_ids


def test_num_unfinished_counts_what_was_submitted_and_not_returned(engine: Engine):
    for seed in range(MAX_SEQUENCES + 2):
        engine.submit(make_request(seed, max_tokens=2 if seed else 9))
    assert engine.num_unfinished == MAX_SEQUENCES + 2
    returned = 0
    while engine.num_unfinished:
        returned += len(engine.step())
        assert engine.num_unfinished == MAX_SEQUENCES + 2 - returned


def test_a_step_of_an_idle_engine_returns_nothing(engine: Engine):
    assert engine.step() == []


def test_an_aborted_request_is_returned_with_what_it_had_and_never_comes_again(engine: Engine):
    (whole,) = generate(engine, make_request(4))
    aborted, kept = make_request(4), make_request(6)
    engine.submit(aborted)
    engine.submit(kept)
    assert steps(engine, 5) == []
    (one,) = engine.abort([aborted.request_id])
    assert one.request_id == aborted.request_id
    assert one.finish_reason is FinishReason.ABORTED
    assert 1 <= len(one.token_ids) < 12
    assert one.token_ids == whole.token_ids[: len(one.token_ids)]
    assert len(one.token_ids) == len(one.logprobs) == len(one.versions)
    assert engine.abort([aborted.request_id]) == []
    assert set(drain(engine)) == {kept.request_id}


def test_a_request_that_never_ran_is_aborted_empty(engine: Engine):
    requests = [make_request(seed) for seed in range(MAX_SEQUENCES + 1)]
    for request in requests:
        engine.submit(request)
    (one,) = engine.abort([requests[-1].request_id])
    assert (one.token_ids, one.logprobs, one.versions) == ([], [], [])
    assert set(drain(engine)) == {request.request_id for request in requests[:-1]}


def test_aborting_what_is_unknown_or_finished_returns_nothing(engine: Engine):
    request = make_request()
    generate(engine, request)
    assert engine.abort([request.request_id, "never heard of"]) == []


def test_a_score_in_between_loses_no_running_request_and_changes_none(engine: Engine):
    requests = [make_request(seed, max_tokens=3 + 2 * seed) for seed in range(MAX_SEQUENCES + 2)]
    expected = {request.seed: generate(engine, make_request(request.seed, max_tokens=request.max_tokens))[0]
                for request in requests}  # fmt: skip
    quiet = engine.score([3, 1, 4, 1, 5])
    for request in requests:
        engine.submit(request)
    finished = engine.step()
    for _ in range(3):
        assert engine.score([3, 1, 4, 1, 5]) == pytest.approx(quiet, abs=1e-4)
        finished += engine.step()
    finished += drain(engine).values()
    assert len(finished) == len(requests)
    for one in finished:
        request = next(request for request in requests if request.request_id == one.request_id)
        assert one.token_ids == expected[request.seed].token_ids
        assert one.finish_reason is FinishReason.LENGTH


def test_a_request_that_ends_during_a_score_is_delivered_exactly_once(engine: Engine):
    requests = [make_request(seed, max_tokens=1) for seed in range(3)]
    for request in requests:
        engine.submit(request)
    engine.score(PROMPT)
    assert engine.num_unfinished == 3
    assert set(drain(engine)) == {request.request_id for request in requests}


def test_score_gives_one_logprob_for_each_token_after_the_first(engine: Engine):
    scores = engine.score([3, 1, 4, 1, 5])
    assert len(scores) == 4
    assert all(score <= 0 for score in scores)
    assert engine.score([3, 1, 4, 1, 5]) == scores


class Link:
    """The publisher's end, in a thread: member 0 of a group of two."""

    def __init__(self, store: str) -> None:
        self._store, self._group = store, None
        self._thread = ThreadPoolExecutor(max_workers=1)

    def join(self, engine: Engine) -> None:
        prefix = f"transfer-{next(NAMES)}"
        forming = self._thread.submit(
            TransferGroup, Membership(store=self._store, prefix=prefix, rank=0, size=2, backend="gloo"), 60.0
        )
        engine.join(JoinRequest(store=self._store, prefix=prefix, first_rank=1, size=2, backend="gloo"))
        self._group = forming.result(60)

    def receive(self, engine: Engine, version: int, *, sent_version: int | None = None) -> str:
        sending = self._thread.submit(self._send, version if sent_version is None else sent_version)
        try:
            return engine.receive(version, 60.0)
        finally:
            sending.result(60)

    def _send(self, version: int) -> None:
        """The model's own weights again: they change nothing but the version."""
        assert self._group is not None
        weights = model_weights()
        metas = [TensorMeta(name=name, dtype="float32", shape=tuple(weights[name].shape)) for name in weights]
        header = StreamHeader(version=version, tensors=tuple(metas), bucket_bytes=1 << 20)
        data = bytearray(header.to_bytes())
        pieces = [torch.tensor([len(data)]), torch.frombuffer(data, dtype=torch.uint8)]
        tensors = list(weights.values())
        for bucket in header.buckets():
            flat = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
            for slot in bucket.slots:
                flat[slot.start : slot.stop] = tensors[slot.index].contiguous().flatten().view(torch.uint8)
            pieces.append(flat)
        for piece in pieces:
            self._group.finish(self._group.broadcast(piece), time.monotonic() + 60, on_wait=lambda: None)

    def leave(self) -> TransferGroup | None:
        group, self._group = self._group, None
        return group

    def close(self) -> None:
        self.leave()  # first: the engine may still wait for it
        self._thread.shutdown()


def model_weights() -> dict[str, torch.Tensor]:
    if not MODEL.is_dir():
        return {f"layer.{number}": torch.full((300, 400), float(number)) for number in range(4)}
    from safetensors.torch import load_file

    return load_file(MODEL / "model.safetensors")


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    link = Link(f"127.0.0.1:{store.port}")
    yield link
    link.close()


def test_versions_of_a_running_request_change_exactly_at_apply(engine: Engine, link: Link):
    before = engine.version
    (undisturbed,) = generate(engine, make_request(8))
    link.join(engine)
    request = make_request(8)
    engine.submit(request)
    steps(engine, 4)
    link.receive(engine, before + 1)
    assert engine.version == before
    engine.apply(before + 1)
    assert engine.version == before + 1
    steps(engine, 3)
    link.receive(engine, before + 2)
    engine.apply(before + 2)
    one = drain(engine)[request.request_id]
    assert one.versions == [before] * 4 + [before + 1] * 3 + [before + 2] * 5
    assert one.token_ids == undisturbed.token_ids


def test_one_group_serves_many_versions_and_the_digest_tells_them_apart(engine: Engine, link: Link):
    link.join(engine)
    versions = [engine.version + 1, engine.version + 2]
    digests = []
    for version in versions:
        digests.append(link.receive(engine, version))
        engine.apply(version)
        assert engine.version == version
    assert len(set(digests)) == 2
    assert all(len(digest) == 64 for digest in digests)


def test_a_stream_that_is_refused_after_it_arrived_may_be_sent_again(engine: Engine, link: Link):
    link.join(engine)
    before, scores = engine.version, engine.score(PROMPT)
    first = link.receive(engine, before + 1)
    # No commit: the publisher found another digest elsewhere.
    assert link.receive(engine, before + 1) == first
    assert (engine.version, engine.score(PROMPT)) == (before, scores)
    engine.apply(before + 1)
    assert engine.version == before + 1


def test_weights_of_another_version_than_was_due_are_refused(engine: Engine, link: Link):
    link.join(engine)
    before, scores = engine.version, engine.score(PROMPT)
    with pytest.raises(TransferError, match=f"version {before + 7} arrived, version {before + 1} was due"):
        link.receive(engine, before + 1, sent_version=before + 7)
    assert (engine.version, engine.score(PROMPT)) == (before, scores)
    link.receive(engine, before + 1)
    engine.apply(before + 1)


def test_a_silent_publisher_is_an_error_at_the_deadline(engine: Engine, link: Link):
    link.join(engine)
    began, scores = time.monotonic(), engine.score(PROMPT)
    with pytest.raises(TransferError, match="silent past the deadline"):
        engine.receive(engine.version + 1, 0.5)
    assert engine.score(PROMPT) == scores
    silent = link.leave()
    link.join(engine)  # although the old group's other end is still there and says nothing
    assert time.monotonic() - began < 10
    link.receive(engine, engine.version + 1)
    engine.apply(engine.version + 1)
    assert silent is not None
