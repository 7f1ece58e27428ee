"""vLLM on a GPU takes weights from a publisher over gloo: staged on the host, they are what it then computes with.

Over gloo, because NCCL refuses two members on one GPU.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.distributed as dist

from towline.rollout.engine import GenerationRequest
from towline.rollout.transfer_group import Membership, TransferGroup
from towline.storage.weight_stream import JoinRequest, TensorMeta
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.policy import load_policy
from towline.trainer.weight_publisher import publish_weights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

TOKENS = [int(token) for token in np.random.default_rng(0).integers(3, 1600, 256)]


class Weights:
    """Of a plain model, held on the GPU as a trainer's are."""

    def __init__(self, model):
        self.named = [(name, parameter.detach().cuda()) for name, parameter in model.named_parameters()]

    def tensors(self):
        return [TensorMeta(name=name, dtype="float32", shape=tuple(weight.shape)) for name, weight in self.named]

    @contextlib.contextmanager
    def gathered(self, indices):
        yield [self.named[index][1] for index in indices]


def trainer_logprobs(folder):
    policy = load_policy(folder, temperature=1.0, precision="float32")
    with torch.no_grad():
        return policy(pack([TokenSequence(token_ids=np.array(TOKENS), num_prompt_tokens=1)]))[0].cpu().numpy()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_engine_computes_with_the_weights_that_it_received(save_llama, tmp_path, tied, precision):
    from towline.rollout.vllm_engine import VllmEngine

    save_llama(tmp_path / "old", seed=0, tied=tied)
    new = save_llama(tmp_path / "new", seed=1, tied=tied)
    old_logprobs, new_logprobs = trainer_logprobs(tmp_path / "old"), trainer_logprobs(tmp_path / "new")
    bound = 1e-3 if precision == "float32" else 0.5
    engine = VllmEngine(tmp_path / "old", precision=precision, max_context_tokens=512, max_sequences=8, gpu_memory=0.2)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    try:
        assert np.abs(np.array(engine.score(TOKENS)) - old_logprobs).max() < bound
        engine.submit(request("in flight"))
        for _ in range(5):
            engine.step()
        with ThreadPoolExecutor(max_workers=1) as thread:
            digest = thread.submit(publish, address, Weights(new), precision)
            engine.join(JoinRequest(store=address, prefix="gpu", first_rank=1, size=2, backend="gloo"))
            received = engine.receive(1, timeout_s=60)
            assert received == digest.result()
        # Received and not yet applied: nothing has changed.
        assert np.abs(np.array(engine.score(TOKENS)) - old_logprobs).max() < bound
        engine.apply(1)
        found = np.array(engine.score(TOKENS))
        assert np.abs(found - new_logprobs).max() < bound
        assert np.abs(found - old_logprobs).max() > 1.0
        finished = []
        while engine.num_unfinished:
            finished += engine.step()
        (generated,) = finished
        assert sorted(set(generated.versions)) == [0, 1]
    finally:
        engine.close()


def publish(address, weights, precision):
    torch.cuda.set_device(0)
    group = TransferGroup(Membership(store=address, prefix="gpu", rank=0, size=2, backend="gloo"))
    return publish_weights(weights, 1, sender=group, wire_dtype=precision, timeout_s=60)


def request(name):
    return GenerationRequest(
        request_id=name, prompt_token_ids=TOKENS[:20], seed=1, temperature=1.0, max_tokens=64, stop_token_ids=[]
    )
