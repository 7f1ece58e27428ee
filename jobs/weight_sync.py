"""How a new version gets from the trainer to every engine, over the control store and a transfer group.

    trainer                                   each engine, between two of its steps
    publish/{n} = version, members, group ──► ack/{n}/{engine}
    (the group forms, once)                   (joins)
    buckets ────────────────────────────────► staged on the host, hashed
                                              received/{n}/{engine} = digest
    outcome/{n} = commit | again | failed ──► commit: weights applied, caches dropped; probe/{n}/{engine} = log-probs
    compares the probe with its own

n counts publications, so that the same version can be sent again. Nothing is generated between receive and outcome.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from towline.jobs.control_store import ControlStore
from towline.rollout.engine import Engine
from towline.rollout.transfer_group import Membership, TransferGroup
from towline.storage.errors import StoreError, TransferError
from towline.storage.weight_stream import JoinRequest
from towline.trainer.deepspeed_engine import DeepSpeedEngine
from towline.trainer.weight_publisher import publish_weights

_TRIES = 2
_PATIENCE = 4
"""Rank 0 waits for acknowledgements, stream and digests in turn. Who waits for its verdict waits longer than all three,
so that the error that names the silent engine comes first."""
_FAILED = "failed: "
_ANSWERS = {
    "ack": "take up the publication of new weights",
    "received": "report the weights it received",
    "probe": "answer the probe after new weights",
}


@dataclass(slots=True)
class Publisher:
    """The trainer's half; every rank calls `publish`, rank 0 speaks for all.

    Args:
        num_engines: all of them take part, or the publication fails naming who did not.
        backend: of the transfer group, "gloo" or "nccl".
        workers_per_engine: tensor-parallel workers, each a member of the transfer group.
    """

    store: ControlStore
    engine: DeepSpeedEngine
    num_engines: int
    wire_dtype: str
    timeout_s: float
    on_wait: Callable[[], None]
    backend: str = "gloo"
    workers_per_engine: int = 1
    attempt: int = 0
    _group: TransferGroup | None = None
    _serial: int = -1

    def publish(self, version: int) -> list[list[float]]:
        """Bring the present weights to every engine as `version`; return each engine's probe log-probs (rank 0)."""
        for attempt in range(1, _TRIES + 1):
            self._serial += 1
            outcome = self._send_once(version, is_last_try=attempt == _TRIES)
            if outcome == "commit":
                return self._probes()
        raise AssertionError("the last try commits or raises")

    def _send_once(self, version: int, *, is_last_try: bool) -> str:
        serial = self._serial
        if dist.get_rank() != 0:
            publish_weights(self.engine, version, sender=None, wire_dtype=self.wire_dtype, timeout_s=self.timeout_s)
            return self.store.wait(f"outcome/{serial}", _PATIENCE * self.timeout_s, self.on_wait)
        self._gather_members(version)
        assert self._group is not None
        failure: str | None = None
        try:
            digest = publish_weights(
                self.engine,
                version,
                sender=self._group,
                wire_dtype=self.wire_dtype,
                timeout_s=self.timeout_s,
                on_wait=self.on_wait,
            )
            received = self._collect("received")
            wrong = [number for number, other in enumerate(received) if other != digest]
            if wrong:
                answer = received[wrong[0]]
                failure = f"engine {wrong[0]} received other bytes than were sent ({answer!r}, not {digest!r})"
                # Whole but altered bytes leave the group in step; a receiver that gave up half-way does not.
                if any(str(other).startswith(_FAILED) for other in received):
                    self._group = None
        except TransferError as error:
            failure = str(error)
            # A broken group cannot be used again; the next try forms another under a fresh prefix.
            self._group = None
        outcome = "commit" if failure is None else "failed" if is_last_try else "again"
        self.store.set(f"outcome/{serial}", outcome)
        if outcome == "failed":
            raise TransferError(f"weights of version {version} were refused {_TRIES} times: {failure}")
        return outcome

    def _gather_members(self, version: int) -> None:
        size = 1 + self.num_engines * self.workers_per_engine
        prefix = f"attempt-{self.attempt}/transfer-{self._serial}"
        joins: list[dict[str, Any] | None] = [None] * self.num_engines
        if self._group is None:
            joins = [
                asdict(
                    JoinRequest(
                        store=self.store.address,
                        prefix=prefix,
                        first_rank=1 + number * self.workers_per_engine,
                        size=size,
                        backend=self.backend,
                    )
                )
                for number in range(self.num_engines)
            ]
        request = {"serial": self._serial, "version": version, "joins": joins, "timeout_s": self.timeout_s}
        self.store.set("publish", request)
        self._collect("ack")
        if self._group is None:
            self._group = TransferGroup(
                Membership(store=self.store.address, prefix=prefix, rank=0, size=size, backend=self.backend)
            )

    def _probes(self) -> list[list[float]]:
        return self._collect("probe") if dist.get_rank() == 0 else []

    def _collect(self, what: str) -> list[Any]:
        deadline = time.monotonic() + self.timeout_s
        answers = []
        for number in range(self.num_engines):
            left = max(0.1, deadline - time.monotonic())
            try:
                answers.append(self.store.wait(f"{what}/{self._serial}/{number}", left, self.on_wait))
            except StoreError as error:
                if time.monotonic() < deadline:
                    raise  # the store itself is gone
                raise StoreError(
                    f"engine {number} did not {_ANSWERS[what]} within {self.timeout_s:g} s (run.sync_timeout_s; "
                    f"publication {self._serial}, {what}). See its log rollout.{number}.log, or raise the limit."
                ) from error
        return answers


@dataclass(slots=True)
class Subscriber:
    """The engine's half."""

    store: ControlStore
    engine: Engine
    number: int
    beat: Callable[[str], None]
    digests: dict[int, str] = field(default_factory=dict)
    """Version → digest of the stream it came in."""
    _serial: int = -1

    def introduce(self) -> None:
        """Say that the engine is ready, with its answer to the probe under the weights it read from the folder."""
        self.store.set(f"engine/{self.number}", {"probe": self._probe()})

    def serve(self) -> None:
        """Take part in the publication that is asked for, if there is a new one; else return at once."""
        request = self.store.get("publish")
        if request is None or request["serial"] == self._serial:
            return
        self._serial = request["serial"]
        self.beat("receive weights")
        self.store.set(f"ack/{self._serial}/{self.number}", True)
        join = request["joins"][self.number]
        if join is not None:
            self.engine.join(JoinRequest(**join))
        try:
            digest = self.engine.receive(request["version"], request["timeout_s"])
        except TransferError as error:
            digest = f"{_FAILED}{error}"
        self.store.set(f"received/{self._serial}/{self.number}", digest)
        outcome = self.store.wait(
            f"outcome/{self._serial}", _PATIENCE * request["timeout_s"], on_wait=lambda: self.beat("receive weights")
        )
        if outcome == "commit":
            self.engine.apply(request["version"])
            self.digests[request["version"]] = digest
            self.beat("probe")
            self.store.set(f"probe/{self._serial}/{self.number}", self._probe())

    def _probe(self) -> list[float]:
        tokens = self.store.wait("probe_tokens", math.inf, on_wait=lambda: self.beat("wait for the trainer"))
        return self.engine.score(tokens)
