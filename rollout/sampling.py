"""From the prompts of a chunk to requests, and from what the engine generated to rollout groups."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from towline.rollout.engine import Generated, GenerationRequest
from towline.storage.records import ChunkId, Completion, Prompt, RolloutGroup
from towline.storage.schedule import sampling_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    group_size: int
    temperature: float
    max_completion_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    """Of the experiment; each completion's own is a function of it, the step, wave, row and its number."""


@dataclass(slots=True, kw_only=True)
class ChunkInFlight:
    """One chunk from its first request to its last completion."""

    chunk: ChunkId
    prompts: Sequence[Prompt]
    prompt_token_ids: Sequence[list[int]]
    settings: SamplingSettings
    name: str
    """Prefix of its request ids, unique in the engine."""
    began: float = field(default_factory=time.time)
    _done: dict[str, Generated] = field(default_factory=dict)

    def requests(self) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                request_id=self._request_id(group, sample),
                prompt_token_ids=token_ids,
                seed=self._seed(group, sample),
                temperature=self.settings.temperature,
                max_tokens=self.settings.max_completion_tokens,
                stop_token_ids=list(self.settings.stop_token_ids),
            )
            for group, token_ids in enumerate(self.prompt_token_ids)
            for sample in range(self.settings.group_size)
        ]

    def take(self, generated: Generated) -> bool:
        """Keep a finished request if it belongs here."""
        is_ours = generated.request_id.startswith(f"{self.name}/")
        if is_ours:
            self._done[generated.request_id] = generated
        return is_ours

    @property
    def is_complete(self) -> bool:
        return len(self._done) == len(self.prompts) * self.settings.group_size

    def groups(self, decode: Callable[[list[int]], str]) -> tuple[RolloutGroup, ...]:
        return tuple(
            RolloutGroup(
                prompt=prompt,
                prompt_token_ids=np.array(self.prompt_token_ids[group], dtype=np.int32),
                completions=tuple(
                    self._completion(group, sample, decode) for sample in range(self.settings.group_size)
                ),
            )
            for group, prompt in enumerate(self.prompts)
        )

    def _completion(self, group: int, sample: int, decode: Callable[[list[int]], str]) -> Completion:
        generated = self._done[self._request_id(group, sample)]
        return Completion(
            token_ids=np.array(generated.token_ids, dtype=np.int32),
            logprobs=np.array(generated.logprobs, dtype=np.float32),
            versions=np.array(generated.versions, dtype=np.uint32),
            finish_reason=generated.finish_reason,
            seed=self._seed(group, sample),
            text=decode(generated.token_ids),
        )

    def _request_id(self, group: int, sample: int) -> str:
        return f"{self.name}/{group}.{sample}"

    def _seed(self, group: int, sample: int) -> int:
        chunk = self.chunk
        return sampling_seed(self.settings.seed, chunk.step, chunk.wave, self.prompts[group].row, sample)
