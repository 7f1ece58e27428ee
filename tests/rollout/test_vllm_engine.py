"""vLLM against transformers: the same log-probs, before and after weights change under running requests.

One engine over a model with a tied output head, and a transformers model with the same weights beside it, which
publishes from a thread through the real store, group and publisher. Version v has weights that are a function of v.
"""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from towline.jobs.launch import LocalLauncher
from towline.jobs.probe import Probe, probe_tokens
from towline.jobs.store_handle import StoreHandle
from towline.rollout.engine import Generated, GenerationRequest
from towline.rollout.transfer_group import Membership, TransferGroup
from towline.rollout.vllm_engine import VllmEngine, sampled_logprobs
from towline.storage.errors import ProbeError, TransferError
from towline.storage.weight_stream import JoinRequest, StreamHeader, TensorMeta

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
BOUND = 1e-4
STEP_SIZE = 0.05
"""Of a version's difference from the model on disk, in weights of the same tensor: far above any noise."""
PROBE = probe_tokens(49152, 128)
BLOCK_TOKENS = 128
"""vLLM's KV-cache block on CPU: shorter prompts are never found in the prefix cache."""

pytestmark = pytest.mark.slow


class Twin:
    """What the trainer has: the model, and the two verbs through which it is published."""

    def __init__(self) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        self._named = list(self.model.named_parameters())
        self._original = [parameter.detach().clone() for _, parameter in self._named]
        self.also_sends_head = False
        self.version = 0
        self._probes: dict[int, np.ndarray] = {}

    @torch.no_grad()
    def become(self, version: int) -> None:
        if version == self.version:
            return
        for (_, parameter), original in zip(self._named, self._original, strict=True):
            others = original.flatten().roll(17 * version).view(original.shape)
            parameter.copy_(original + (STEP_SIZE * others if version else 0.0))
        self.version = version

    def tensors(self) -> list[TensorMeta]:
        return [TensorMeta(name=name, dtype="float32", shape=tuple(tensor.shape)) for name, tensor in self._sent()]

    @contextmanager
    def gathered(self, indices: Sequence[int]) -> Iterator[list[torch.Tensor]]:
        yield [self._sent()[index][1].detach() for index in indices]

    def _sent(self) -> list[tuple[str, torch.nn.Parameter]]:
        return self._named + ([("lm_head.weight", self.model.lm_head.weight)] if self.also_sends_head else [])

    @torch.no_grad()
    def logprobs(self, prompt: list[int], completion: list[int], temperature: float = 1.0) -> np.ndarray:
        """Teacher forcing: log-prob of each completion token."""
        logits_TV = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
        return logits_TV.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].numpy()

    def probe(self, version: int) -> np.ndarray:
        """Log-probs of the probe text under the weights of `version`."""
        if version not in self._probes:
            self.become(version)
            self._probes[version] = self.logprobs(PROBE[:1], PROBE[1:])
        return self._probes[version]


class Publication:
    """Sends from a thread, on a fresh group each time, while the engine receives."""

    def __init__(self, store: str, twin: Twin, engine: VllmEngine) -> None:
        self._store, self._twin, self._engine = store, twin, engine
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._serial = 0

    def membership(self) -> tuple[Membership, JoinRequest]:
        self._serial += 1
        common: dict[str, Any] = {
            "store": self._store,
            "prefix": f"transfer-{self._serial}",
            "size": 2,
            "backend": "gloo",
        }
        return Membership(rank=0, **common), JoinRequest(first_rank=1, **common)

    def send(self, version: int, wrap: Callable[[TransferGroup], Any] = lambda group: group) -> tuple[str, str]:
        """Bring the twin to `version`, send it and stage it. Returns the digest at either end."""
        self._twin.become(version)
        sender, receiver = self.membership()
        sent: Future[str] = self._thread.submit(self._publish, sender, version, wrap)
        self._engine.join(receiver)
        received = self._engine.receive(version, 120.0)
        return sent.result(120), received

    def update(self, version: int) -> None:
        sent, received = self.send(version)
        assert sent == received
        self._engine.apply(version)

    def _publish(self, membership: Membership, version: int, wrap: Callable[[TransferGroup], Any]) -> str:
        from towline.trainer.weight_publisher import publish_weights

        sender: Any = wrap(TransferGroup(membership, 60.0))
        trainer: Any = self._twin
        return publish_weights(trainer, version, sender=sender, wire_dtype="float32", timeout_s=120.0)

    def close(self) -> None:
        self._thread.shutdown()


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    if not MODEL.is_dir():
        pytest.skip(f"{MODEL} is not there; bash env/setup.sh makes it")
    environment = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports use what torch has deprecated
        engine = VllmEngine(MODEL, precision="float32", max_context_tokens=320, max_sequences=8)
    yield engine
    engine.close()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def twin(engine: VllmEngine) -> Twin:
    return Twin()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    handle = StoreHandle(b"key", 0, tmp_path_factory.mktemp("store") / "store.log", LocalLauncher().store_command())
    yield handle.address
    handle.close()


@pytest.fixture(scope="module")
def publication(store: str, twin: Twin, engine: VllmEngine) -> Iterator[Publication]:
    publication = Publication(store, twin, engine)
    yield publication
    publication.close()


@pytest.fixture
def synced(engine: VllmEngine, twin: Twin, publication: Publication) -> Publication:
    """Engine and twin at the same version, whatever the test before did."""
    assert engine.num_unfinished == 0
    if np.abs(np.array(engine.score(PROBE)) - twin.probe(engine.version)).max() > BOUND:
        publication.update(engine.version + 1)
    return publication


TEXT = (
    "In the beginning the engineers built a bridge across the wide river, and every stone was counted twice before it "
    "was placed; those who came later measured it again, wrote the numbers into a book, and the book was kept. "
)


@pytest.fixture(scope="module")
def text(twin: Twin) -> list[int]:
    from towline.rollout.tokenizing import PromptTokenizer

    return PromptTokenizer(MODEL, chat=False).encode(TEXT * 8)


def make_request(name: str, prompt: list[int], *, seed: int = 0, temperature: float = 1.0, max_tokens: int = 20):
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=prompt,
        seed=seed,
        temperature=temperature,
        max_tokens=max_tokens,
        stop_token_ids=[],
    )


def drain(engine: VllmEngine) -> dict[str, Generated]:
    finished: list[Generated] = []
    while engine.num_unfinished:
        finished += engine.step()
    return {one.request_id: one for one in finished}


def test_a_logprob_is_looked_up_by_its_token_whatever_comes_first():
    # case G3-16: the likeliest token stands first
    from vllm.logprobs import Logprob

    entries = [
        {12: Logprob(logprob=-0.7, rank=1), 385: Logprob(logprob=-4.2, rank=9)},
        {385: Logprob(logprob=-3.1, rank=5), 12: Logprob(logprob=-0.2, rank=1)},
    ]
    assert sampled_logprobs(entries, [385, 385]) == [-4.2, -3.1]
    with pytest.raises(ValueError, match="longer"):
        sampled_logprobs(entries[:1], [385, 385])


# case G3-14: at the temperature of the request
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_teacher_forcing(engine: VllmEngine, twin: Twin, text: list[int], temperature: float):
    twin.become(engine.version)
    requests = [
        make_request(str(number), text[number : number + 24], seed=number, temperature=temperature)
        for number in range(4)
    ]
    for request in requests:
        engine.submit(request)
    finished = drain(engine)
    largest = 0.0
    for request in requests:
        one = finished[request.request_id]
        expected = twin.logprobs(request.prompt_token_ids, one.token_ids, temperature)
        largest = max(largest, float(np.abs(expected - one.logprobs).max()))
    print(f"T={temperature}: largest difference {largest:.1e}")
    assert largest < BOUND


def test_a_request_that_vllm_refuses_is_not_waited_for(engine: VllmEngine, text: list[int]):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="321"):
        engine.submit(make_request("too long", (text * 3)[:321]))
    assert engine.num_unfinished == 0


def test_each_token_of_a_running_request_comes_from_the_weights_of_its_version(
    engine: VllmEngine, twin: Twin, synced: Publication, text: list[int]
):
    """Two updates in flight, prompts longer than a block: every cached key and value is made anew."""
    first = engine.version
    requests = [
        make_request("a", text[:150], seed=1, max_tokens=18),
        make_request("b", text[3:140], seed=2, temperature=0.7, max_tokens=18),
        make_request("c", text[9:30], seed=3, max_tokens=18),
    ]
    for request in requests:
        engine.submit(request)
    for version in (first + 1, first + 2):
        for _ in range(6):
            engine.step()
        synced.update(version)
    finished = drain(engine)
    differences: dict[tuple[int, int], float] = {}
    for of_weights in (first, first + 1, first + 2):
        twin.probe(of_weights)  # kept, so that these weights need not be made again below
        twin.become(of_weights)
        for request in requests:
            one = finished[request.request_id]
            expected = twin.logprobs(request.prompt_token_ids, one.token_ids, request.temperature)
            for of_tokens in (first, first + 1, first + 2):
                chosen = np.array(one.versions) == of_tokens
                assert chosen.sum() == 6
                difference = np.abs(expected - one.logprobs)[chosen].max()
                key = of_tokens - first, of_weights - first
                differences[key] = max(differences.get(key, 0.0), float(difference))
    print("largest differences (tokens of, weights of):", {key: f"{d:.1e}" for key, d in differences.items()})
    for (of_tokens, of_weights), difference in differences.items():
        assert (difference < BOUND) == (of_tokens == of_weights), differences
    metrics = Probe(is_float32=True).judge(
        first + 2, [engine.score(PROBE)], twin.probe(first + 2), twin.probe(first + 1)
    )
    print(metrics)
    assert metrics["probe/verdict"] == 1.0
    assert metrics["probe/new"] < BOUND
    assert metrics["probe/old"] > 0.1


def test_the_prefix_cache_is_dropped_with_the_old_weights(
    engine: VllmEngine, twin: Twin, synced: Publication, text: list[int], monkeypatch: pytest.MonkeyPatch
):
    # case G6-01: the same greedy prompt again after an update
    prompt = text[20 : 20 + BLOCK_TOKENS + 10]
    cached: dict[str, int | None] = {}
    step = engine._engine.step

    def recording() -> Any:
        outputs = step()
        cached.update({output.request_id: output.num_cached_tokens for output in outputs})
        return outputs

    monkeypatch.setattr(engine._engine, "step", recording)
    completions = {}
    for name in ("before", "again", "after"):
        if name == "after":
            synced.update(engine.version + 1)
        engine.submit(make_request(name, prompt, temperature=0.0, max_tokens=6))
        completions |= drain(engine)
    assert (cached["before"], cached["again"], cached["after"]) == (0, BLOCK_TOKENS, 0)
    assert completions["before"].token_ids == completions["again"].token_ids
    after = completions["after"]
    assert np.abs(twin.logprobs(prompt, after.token_ids) - after.logprobs).max() < BOUND


def test_a_tied_head_that_is_sent_too_changes_nothing(engine: VllmEngine, twin: Twin, synced: Publication):
    # case G6-06: embedding and head are one tensor under two names; usually it is sent once
    old = twin.probe(engine.version)
    twin.also_sends_head = True
    try:
        synced.update(engine.version + 1)
    finally:
        twin.also_sends_head = False
    metrics = Probe(is_float32=True).judge(engine.version, [engine.score(PROBE)], twin.probe(engine.version), old)
    assert metrics["probe/new"] < BOUND


def test_the_probe_catches_an_update_that_was_received_and_not_loaded(
    engine: VllmEngine, twin: Twin, synced: Publication, monkeypatch: pytest.MonkeyPatch
):
    from towline.rollout.weight_receiver import WeightReceiver

    old = twin.probe(engine.version)
    monkeypatch.setattr(WeightReceiver, "finish_weight_update", lambda self: None)
    synced.update(engine.version + 1)
    new = twin.probe(engine.version)
    with pytest.raises(ProbeError, match=f"engine 0 does not use the weights of version {engine.version}"):
        Probe(is_float32=True).judge(engine.version, [engine.score(PROBE)], new, old)


def test_the_probe_catches_a_tied_head_that_kept_the_old_weights_though_the_digests_agree(
    engine: VllmEngine, twin: Twin, publication: Publication, monkeypatch: pytest.MonkeyPatch
):
    from towline.rollout import weight_receiver

    old = twin.probe(engine.version)
    monkeypatch.setattr(weight_receiver, "repack_output_head", lambda model: None)
    publication.update(engine.version + 1)
    new = twin.probe(engine.version)
    stale = np.array(engine.score(PROBE))
    print(f"stale head: {np.abs(stale - new).mean():.2f} from new, {np.abs(stale - old).mean():.2f} from old, "
          f"new from old {np.abs(new - old).mean():.2f} (means)")  # fmt: skip
    with pytest.raises(ProbeError):
        Probe(is_float32=True).judge(engine.version, [stale.tolist()], new, old)


DYING_PUBLISHER = """
import json, os, signal, sys, time
import torch
from towline.rollout.transfer_group import Membership, TransferGroup
from towline.storage.weight_stream import StreamHeader
group = TransferGroup(Membership(**json.loads(sys.argv[1])), 60.0)
data = bytearray(sys.stdin.buffer.read())
buckets = StreamHeader.from_bytes(bytes(data)).buckets()
pieces = [torch.tensor([len(data)]), torch.frombuffer(data, dtype=torch.uint8)]
pieces += [torch.ones(bucket.num_bytes, dtype=torch.uint8) for bucket in buckets[: len(buckets) // 2]]
for piece in pieces:
    group.finish(group.broadcast(piece), time.monotonic() + 60, on_wait=lambda: None)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_publisher_that_dies_half_way_leaves_the_old_weights_whole(
    engine: VllmEngine, twin: Twin, publication: Publication, text: list[int]
):
    before, scores = engine.version, engine.score(PROBE)
    engine.submit(make_request("running", text[:20], max_tokens=12))
    engine.step()
    sender, receiver = publication.membership()
    fields = {name: getattr(sender, name) for name in ("store", "prefix", "rank", "size", "backend")}
    command = [sys.executable, "-P", "-c", DYING_PUBLISHER, json.dumps(fields)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as publisher:
        assert publisher.stdin is not None
        publisher.stdin.write(StreamHeader(version=before + 1, tensors=tuple(twin.tensors())).to_bytes())
        publisher.stdin.close()
        engine.join(receiver)
        with pytest.raises(TransferError):
            engine.receive(before + 1, 60.0)
        died = time.monotonic()
        assert publisher.wait(30) == -signal.SIGKILL
    assert time.monotonic() - died < 5
    assert engine.score(PROBE) == scores
    with pytest.raises(RuntimeError, match="without a matching start"):
        engine.apply(before + 1)
    assert engine.version == before

    publication.update(before + 1)
    one = drain(engine)["running"]
    assert set(one.versions) == {before, before + 1}
    new, old = twin.probe(before + 1), twin.probe(before)
    Probe(is_float32=True).judge(before + 1, [engine.score(PROBE)], new, old)


class FlippingSender:
    """Passes everything on, with one bit of the last bucket changed after it was hashed."""

    def __init__(self, group: TransferGroup, num_pieces: int) -> None:
        self._group, self._left, self.device = group, num_pieces, group.device
        self._kept: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor) -> Any:
        self._left -= 1
        if self._left == 0:
            tensor = tensor.clone()
            tensor[len(tensor) // 2] ^= 1
            self._kept.append(tensor)
        return self._group.broadcast(tensor)

    def finish(self, work: Any, deadline: float, on_wait: Callable[[], None]) -> None:
        self._group.finish(work, deadline, on_wait)


def test_one_flipped_bit_shows_in_the_digest_and_the_stream_can_be_sent_again(
    engine: VllmEngine, twin: Twin, synced: Publication
):
    before, scores = engine.version, engine.score(PROBE)
    num_pieces = 2 + len(StreamHeader(version=before + 1, tensors=tuple(twin.tensors())).buckets())
    sent, received = synced.send(before + 1, lambda group: FlippingSender(group, num_pieces))
    assert sent != received
    assert engine.score(PROBE) == scores
    synced.update(before + 1)
    new, old = twin.probe(before + 1), twin.probe(before)
    Probe(is_float32=True).judge(before + 1, [engine.score(PROBE)], new, old)


def test_weights_of_another_shape_are_an_error(
    engine: VllmEngine, twin: Twin, publication: Publication, monkeypatch: pytest.MonkeyPatch
):
    """Last of all: a model that was loaded in part serves nobody."""
    # case G6-10: a vector of one number would fit by broadcasting
    other = [(name, torch.nn.Parameter(it[:1].detach()) if it.ndim == 1 else it) for name, it in twin._sent()]
    monkeypatch.setattr(twin, "_sent", lambda: other)
    sent, received = publication.send(engine.version + 1)
    assert sent == received
    with pytest.raises(AssertionError, match=r"load weight \(torch.Size\(\[1\]\)\) into parameter"):
        engine.apply(engine.version + 1)
