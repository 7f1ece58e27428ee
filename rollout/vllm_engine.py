"""vLLM in this process, driven step by step.

In-process, because weights may only change between two steps and every token must know its policy version; within
2-5 % of `LLM.generate`. vLLM is imported here and in weight_receiver.py only.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from towline.rollout.engine import Generated, GenerationRequest
from towline.storage.records import FinishReason
from towline.storage.weight_stream import JoinRequest

CPU_BLOCK_TOKENS = 32
"""A prompt is shared by the completions of its group in whole blocks; the CPU build's default of 128 tokens shares
nothing of a short one."""
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}


@dataclasses.dataclass(slots=True)
class _Partial:
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    versions: list[int] = dataclasses.field(default_factory=list)


class VllmEngine:
    """An `Engine` over `vllm.v1.engine.llm_engine.LLMEngine`.

    Args:
        model: folder in Hugging Face layout; its weights are version 0.
        precision: "float32" or "bfloat16".
        max_context_tokens: longest prompt plus completion.
        max_sequences: requests that run at the same time.
        kv_cache_gib: size of the KV cache on CPU, GiB.
        gpu_memory: share of the GPU's memory to use.
        threads: CPU threads.
    """

    def __init__(
        self,
        model: Path,
        *,
        precision: str,
        max_context_tokens: int,
        max_sequences: int,
        kv_cache_gib: int = 1,
        gpu_memory: float = 0.9,
        threads: int = 1,
    ) -> None:
        _set_environment(kv_cache_gib, threads)
        import torch
        from vllm import EngineArgs
        from vllm.config import WeightTransferConfig
        from vllm.v1.engine.llm_engine import LLMEngine

        from towline.rollout import weight_receiver

        weight_receiver.register()
        arguments: dict[str, Any] = {
            "gpu_memory_utilization": gpu_memory,
        }
        if not torch.cuda.is_available():
            # A seeded request that is prefilled in pieces crashes the CPU build (its generators have no offset).
            tokens = max(max_context_tokens, 8192)
            arguments = {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(model),
                dtype=precision,  # pyright: ignore[reportArgumentType]
                max_model_len=max_context_tokens,
                max_num_seqs=max_sequences,
                enable_prefix_caching=True,
                block_size=None if torch.cuda.is_available() else CPU_BLOCK_TOKENS,
                # At the request's own temperature, and of the sampled token: what training needs.
                logprobs_mode="processed_logprobs",
                async_scheduling=False,
                # The compiled path gave wrong greedy answers in bfloat16 on CPU, and takes a minute to build.
                enforce_eager=True,
                generation_config="vllm",
                skip_tokenizer_init=True,
                disable_log_stats=True,
                weight_transfer_config=WeightTransferConfig(backend=weight_receiver.BACKEND),
                **arguments,
            )
        )
        self.version = 0
        self._is_receiving = False
        """vLLM has a weight update open: since the first `receive` until `apply`, or until a stream breaks."""
        self._partial: dict[str, _Partial] = {}
        self._finished: list[Generated] = []

    def submit(self, request: GenerationRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._engine.add_request(
            request.request_id,
            {"prompt_token_ids": request.prompt_token_ids},
            SamplingParams(
                temperature=request.temperature,
                seed=request.seed,
                max_tokens=request.max_tokens,
                stop_token_ids=request.stop_token_ids,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            ),
        )
        # Only now: vLLM may refuse it, and what it refused would be waited for.
        self._partial[request.request_id] = _Partial()

    def step(self) -> list[Generated]:
        self._advance()
        finished, self._finished = self._finished, []
        return finished

    @property
    def num_unfinished(self) -> int:
        return len(self._partial) + len(self._finished)

    def abort(self, request_ids: list[str]) -> list[Generated]:
        known = [request_id for request_id in request_ids if request_id in self._partial]
        self._engine.abort_request(known)
        return [self._take(request_id, FinishReason.ABORTED) for request_id in known]

    def score(self, token_ids: list[int]) -> list[float]:
        from vllm import SamplingParams

        self._engine.add_request(
            "score",
            {"prompt_token_ids": token_ids},
            SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        )
        while True:
            for output in self._advance():
                if output.request_id == "score" and output.finished:
                    return sampled_logprobs(output.prompt_logprobs[1:], token_ids[1:])

    def reset_cache(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache although nothing runs")

    def join(self, request: JoinRequest) -> None:
        self._engine.collective_rpc("init_weight_transfer_engine", args=(dataclasses.asdict(request),))

    def receive(self, version: int, timeout_s: float) -> str:
        if not self._is_receiving:
            self._engine.collective_rpc("start_weight_update")
        # vLLM closes the update itself when this raises; a stream whose digest is refused leaves it open.
        self._is_receiving = False
        self._engine.collective_rpc("update_weights", args=({"version": version, "timeout_s": timeout_s},))
        self._is_receiving = True
        return self._receiver.digest

    def apply(self, version: int) -> None:
        self._engine.collective_rpc("finish_weight_update")
        self._is_receiving = False
        self._engine.set_weight_version(str(version))
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop its prefix cache after a weight update; old keys and values remain")
        self.version = version

    def close(self) -> None:
        self._engine.engine_core.shutdown()

    @property
    def _receiver(self) -> Any:
        return self._engine.model_executor.driver_worker.worker.weight_transfer_engine

    def _advance(self) -> list[Any]:
        """One engine step; what it generated is kept, so that a `score` in between loses nothing."""
        outputs: list[Any] = self._engine.step()
        for output in outputs:
            partial = self._partial.get(output.request_id)
            if partial is None:
                continue
            delta = output.outputs[0]
            partial.token_ids += delta.token_ids
            partial.logprobs += sampled_logprobs(delta.logprobs, delta.token_ids)
            partial.versions += [self.version] * len(delta.token_ids)
            if output.finished:
                self._finished.append(self._take(output.request_id, _FINISH_REASONS[delta.finish_reason]))
        return outputs

    def _take(self, request_id: str, finish_reason: FinishReason) -> Generated:
        partial = self._partial.pop(request_id)
        return Generated(
            request_id=request_id,
            token_ids=partial.token_ids,
            logprobs=partial.logprobs,
            versions=partial.versions,
            finish_reason=finish_reason,
        )


def sampled_logprobs(entries: Sequence[Mapping[int, Any]], token_ids: Sequence[int]) -> list[float]:
    """One log-prob for each token, found by its id: the first entry of vLLM's map may be the likeliest token instead.

    Args:
        entries: for each place, token id → what vLLM says of it (its `Logprob`).
    """
    return [entry[token].logprob for entry, token in zip(entries, token_ids, strict=True)]


def _set_environment(kv_cache_gib: int, threads: int) -> None:
    """vLLM reads these when it is imported."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        # Otherwise the log-prob kernel alone is compiled for 18 s at first use.
        "TORCH_COMPILE_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(threads),
        # "auto" keeps a core for itself, and two engines would bind to the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
