"""An engine without a model: it answers from a script. For tests of everything around an engine, and for dry runs.

It joins real transfer groups and receives real weight streams; its log-probs depend on the version, so that a swap
that did not happen is seen.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

from towline.rollout.engine import Generated, GenerationRequest
from towline.storage.errors import TransferError
from towline.storage.records import FinishReason
from towline.storage.weight_stream import JoinRequest

Script = Callable[[GenerationRequest], Sequence[int]]


def noise_script(vocabulary: int) -> Script:
    """Token ids that depend on prompt and seed only; 1 to max_tokens long, no stop token."""

    def tokens(request: GenerationRequest) -> list[int]:
        state = hashlib.blake2b(repr((request.prompt_token_ids, request.seed)).encode()).digest()
        length = 1 + state[0] % request.max_tokens
        return [int.from_bytes(state[(2 * i) % 62 : (2 * i) % 62 + 2]) % vocabulary for i in range(length)]

    return tokens


@dataclasses.dataclass(slots=True)
class _Running:
    request: GenerationRequest
    script: list[int]
    versions: list[int] = dataclasses.field(default_factory=list)


class ScriptedEngine:
    def __init__(self, script: Script) -> None:
        self._script = script
        self._running: dict[str, _Running] = {}
        self._group = None
        self.version = 0

    def submit(self, request: GenerationRequest) -> None:
        tokens = list(self._script(request))[: request.max_tokens]
        assert tokens, "a script gives at least one token"
        ends = [place for place, token in enumerate(tokens) if token in request.stop_token_ids]
        self._running[request.request_id] = _Running(request, tokens[: ends[0] + 1] if ends else tokens)

    def step(self) -> list[Generated]:
        for running in self._running.values():
            running.versions.append(self.version)
        ended = [name for name, running in self._running.items() if len(running.versions) == len(running.script)]
        return [self._take(name) for name in ended]

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def abort(self, request_ids: list[str]) -> list[Generated]:
        return [self._take(name, FinishReason.ABORTED) for name in request_ids if name in self._running]

    def score(self, token_ids: list[int]) -> list[float]:
        return [self._logprob(token, self.version) for token in token_ids[1:]]

    def reset_cache(self) -> None:
        """There is none."""

    def join(self, request: JoinRequest) -> None:
        from towline.rollout.transfer_group import Membership, TransferGroup  # torch, not needed without weights

        self._group = TransferGroup(
            Membership(
                store=request.store,
                prefix=request.prefix,
                rank=request.first_rank,
                size=request.size,
                backend=request.backend,
            )
        )

    def receive(self, version: int, timeout_s: float) -> str:
        from towline.rollout.receive_stream import receive_stream

        assert self._group is not None, "join comes first"
        header, _, digest = receive_stream(self._group, timeout_s)
        if header.version != version:
            raise TransferError(f"weights of version {header.version} arrived, version {version} was due.")
        return digest

    def apply(self, version: int) -> None:
        self.version = version

    def close(self) -> None:
        self._running.clear()

    def _take(self, name: str, reason: FinishReason | None = None) -> Generated:
        running = self._running.pop(name)
        tokens = running.script[: len(running.versions)]
        stopped = bool(tokens) and tokens[-1] in running.request.stop_token_ids
        return Generated(
            request_id=name,
            token_ids=tokens,
            logprobs=[self._logprob(token, at) for token, at in zip(tokens, running.versions, strict=True)],
            versions=running.versions,
            finish_reason=reason or (FinishReason.STOP if stopped else FinishReason.LENGTH),
        )

    @staticmethod
    def _logprob(token: int, version: int) -> float:
        return -1.0 - 0.01 * (token % 7) - 0.1 * version
