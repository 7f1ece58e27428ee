"""What the rollout role needs of an inference engine. Two implementations: vLLM and a scripted one."""

from dataclasses import dataclass
from typing import Protocol

from towline.storage.records import FinishReason
from towline.storage.weight_stream import JoinRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    request_id: str
    prompt_token_ids: list[int]
    seed: int
    temperature: float
    """0 is greedy."""
    max_tokens: int
    stop_token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A finished request. The three lists are equally long; the stop token, if any, is included."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    """Of the sampled token, natural log, at the request's temperature."""
    versions: list[int]
    finish_reason: FinishReason


class Engine(Protocol):
    """Weights change in `apply` only, which is never called between the `receive` of a stream and its commit.

    Call order of a publication: join(request) when the group changed; receive(version) → digest; apply(version).
    """

    version: int
    """Version of the policy that the next token will come from."""

    def submit(self, request: GenerationRequest) -> None: ...

    def step(self) -> list[Generated]:
        """Generate one token for what runs; return the requests that this finished."""
        ...

    @property
    def num_unfinished(self) -> int: ...

    def abort(self, request_ids: list[str]) -> list[Generated]:
        """Take requests back; what they had generated is returned, marked ABORTED."""
        ...

    def score(self, token_ids: list[int]) -> list[float]:
        """Log-prob of each token after the first, at temperature 1, under the present weights."""
        ...

    def reset_cache(self) -> None:
        """Forget cached keys and values of finished requests; only called while nothing runs."""
        ...

    def join(self, request: JoinRequest) -> None: ...

    def receive(self, version: int, timeout_s: float) -> str:
        """Stage the weights of `version`; return the digest of the stream. The model is unchanged."""
        ...

    def apply(self, version: int) -> None:
        """Load the staged weights, forget every cached key and value, and let running requests be recomputed."""
        ...

    def close(self) -> None: ...
