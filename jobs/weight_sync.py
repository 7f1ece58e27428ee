"""How a new version gets from the trainer to the engines, over the control store and a transfer group.

    trainer, rank 0                               each engine, between two of its steps
    publish = serial, version, candidates ──────► ack/{serial}/{engine}
    form/{serial} = members, group ─────────────► (joins, if the group is a new one)
    buckets ────────────────────────────────────► staged on the host, hashed
                                                  received/{serial}/{engine} = digest
    outcome/{serial} = commit, branch | again ──► commit: weights applied, caches dropped; probe/{serial}/{engine}
    published/{serial}: its other ranks go on

While the policy is still what lies in the model folder nothing is sent: the trainer writes adopt = version, digest,
branch, and the engines that loaded the same folder take their own weights for that version.

A serial counts publications, so that the same version can be sent again. Candidates are the engines that have
announced themselves and that the supervisor has not found dead; who does not acknowledge by the deadline is left out
and may come back with the next publication. A group is formed anew whenever its members change or it broke. Nothing
is generated between receive and outcome.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from towline.jobs.control_store import ControlStore
from towline.rollout.engine import Engine
from towline.rollout.transfer_group import Membership, TransferGroup
from towline.storage.errors import TransferError
from towline.storage.weight_stream import JoinRequest
from towline.trainer.weight_publisher import WeightSource, publish_weights, weights_digest

MAX_TRIES = 5
"""Sends of one version, each to whoever is left."""
_REFUSALS_TO_RESTART = 2
"""An engine that twice received other bytes than were sent is started again; a third time ends the run."""
_POLL_S = 0.005
_FAILED = "failed: "


@dataclass(slots=True)
class Publisher:
    """The trainer's half; every rank calls `publish`, rank 0 speaks for all.

    Args:
        num_engines: how many there can be; those that are there take part.
        settle: told the digest of the weights published as a version before any engine computes with them; returns
            the branch that they belong to.
        meanwhile: called on every rank while the engines take over and answer the probe.
        backend: of the transfer group, "gloo" or "nccl".
        workers_per_engine: tensor-parallel workers, each a member of the transfer group.
    """

    store: ControlStore
    engine: WeightSource
    num_engines: int
    wire_dtype: str
    timeout_s: float
    on_wait: Callable[[], None]
    settle: Callable[[int, str], int] = lambda version, digest: 0
    meanwhile: Callable[[], None] = lambda: None
    backend: str = "gloo"
    workers_per_engine: int = 1
    attempt: int = 0
    digest: str = ""
    """Of the latest stream; on rank 0."""
    probe_s: float = 0.0
    """What the slowest engine took to answer the latest probe, s; on rank 0."""
    _group: TransferGroup | None = None
    _members: dict[int, int] = field(default_factory=dict[int, int])
    """Engine → the life of it that is in the group."""
    _refusals: dict[int, int] = field(default_factory=dict[int, int])
    _serial: int = -1

    def present_digest(self, version: int) -> str:
        """Of the stream that `publish` would send now; on rank 0. Every rank calls it."""
        is_first_rank = dist.get_rank() == 0
        return weights_digest(self.engine, version, wire_dtype=self.wire_dtype, is_first_rank=is_first_rank)

    def adopt(self, version: int, digest: str, model: str) -> bool:
        """Instead of `publish`, while engines have the version's weights from the model folder. Every rank calls it.

        Args:
            digest: of the stream that publishing would send; on rank 0.
            model: identity of the folder that the trainer loaded.

        Returns:
            False if some engine loaded another one: then the version must be published.
        """
        if dist.get_rank() == 0:
            announced = self._announced()
            models = {(self.store.get(f"engine/{number}") or {}).get("model") for number in announced}
            is_same = models == {model}
            if is_same:
                branch = self.settle(version, digest)
                self.digest, self._members = digest, announced
                adoption = {"version": version, "digest": digest, "branch": branch, "engines": list(announced.items())}
                self.store.set("adopt", adoption)
            self.store.set("adopted", is_same)
            return is_same
        return self.store.wait("adopted", math.inf, self.on_wait)

    def publish(self, version: int, *, is_trial: bool = False) -> list[list[float]]:
        """Bring the present weights to the engines as `version`; return their probe log-probs (rank 0).

        Args:
            is_trial: the weights are not those of the version, only a proof of the way; they are not settled.
        """
        for attempt in range(MAX_TRIES):
            self._serial += 1
            if dist.get_rank() == 0:
                probes = self._send(version, is_trial=is_trial)
                self.store.set(f"published/{self._serial}", bool(probes))
                if probes:
                    # Not those of an engine that is being started again.
                    for number in probes:
                        self._refusals.pop(number, None)
                    return list(probes.values())
            elif self._follow(version):
                return []
            if attempt == MAX_TRIES - 1:
                raise TransferError(f"weights of version {version} reached no engine in {MAX_TRIES} tries; see above.")
        raise AssertionError("unreachable")

    @property
    def has_lost_every_engine(self) -> bool:
        """No engine that has the present weights is left, but one is there to receive them. Asked on rank 0."""
        alive = self._announced()
        return bool(alive) and not any(alive.get(number) == life for number, life in self._members.items())

    def _follow(self, version: int) -> bool:
        """The other ranks walk the gathers of whatever rank 0 sends."""
        if self.store.wait(f"form/{self._serial}", math.inf, self.on_wait)["members"]:
            publish_weights(self.engine, version, sender=None, wire_dtype=self.wire_dtype, timeout_s=self.timeout_s)
            if self.store.wait(f"outcome/{self._serial}", math.inf, self.on_wait)["verdict"] == "commit":
                self.meanwhile()
        return self.store.wait(f"published/{self._serial}", math.inf, self.on_wait)

    def _send(self, version: int, *, is_trial: bool) -> dict[int, list[float]]:
        """One try; returns the probes of the engines that took the weights over, none if it must be tried again."""
        members = self._gather_members(version, is_trial=is_trial)
        if not members:
            return {}
        try:
            self._form(members, version)
            branch = self._stream(version, is_trial=is_trial)
        except _HopelessError:
            raise
        except TransferError as error:
            print(f"publication {self._serial} of version {version} is tried again: {error}", flush=True)
            # A broken group cannot be used again; the next try forms another under a fresh prefix.
            self._group, self._members = None, {}
            self.store.set(f"outcome/{self._serial}", {"verdict": "again"})
            return {}
        if branch is None:
            self.store.set(f"outcome/{self._serial}", {"verdict": "again"})
            return {}
        self.store.set(f"outcome/{self._serial}", {"verdict": "commit", "branch": branch})
        self.meanwhile()
        answers = self._collect("probe", members)
        probes = {number: answer["logprobs"] for number, answer in answers.items()}
        self.probe_s = max((answer["seconds"] for answer in answers.values()), default=0.0)
        self._members = {number: life for number, life in members.items() if number in probes}
        if len(probes) < len(members):
            self._group = None
        return probes

    def _gather_members(self, version: int, *, is_trial: bool) -> dict[int, int]:
        candidates = self._announced()
        while not candidates:
            self.on_wait()
            time.sleep(0.1)
            candidates = self._announced()
        request = {"serial": self._serial, "version": version, "candidates": list(candidates.items()),
                   "timeout_s": self.timeout_s, "is_trial": is_trial}  # fmt: skip
        self.store.set("publish", request)
        members = {number: candidates[number] for number in self._collect("ack", candidates)}
        for number in candidates.keys() - members.keys():
            print(f"engine {number} did not take up publication {self._serial} and is left out of it", flush=True)
        if not members:
            self.store.set(f"form/{self._serial}", {"members": []})
        return members

    def _form(self, members: dict[int, int], version: int) -> None:
        """Tell the members their group: the one they have, or a new one that forms now."""
        is_new = self._group is None or members != self._members
        size = 1 + len(members) * self.workers_per_engine
        prefix = f"attempt-{self.attempt}/transfer-{self._serial}"
        joins = [
            JoinRequest(
                store=self.store.address,
                prefix=prefix,
                first_rank=1 + place * self.workers_per_engine,
                size=size,
                backend=self.backend,
            )
            for place in range(len(members))
        ]
        joiners = [[number, asdict(join) if is_new else None] for number, join in zip(members, joins, strict=True)]
        self._members = members
        self.store.set(f"form/{self._serial}", {"members": joiners})
        if is_new:
            own = Membership(store=self.store.address, prefix=prefix, rank=0, size=size, backend=self.backend)
            self._group = None
            try:
                self._group = TransferGroup(own, on_wait=self._wait_for_members)
            except TransferError:
                # The other ranks are on their way through the gathers, and would wait there for this one.
                publish_weights(self.engine, version, sender=None, wire_dtype=self.wire_dtype, timeout_s=self.timeout_s)
                raise

    def _stream(self, version: int, *, is_trial: bool) -> int | None:
        """Send the weights; return their branch once every member has received what was sent, None if one has not."""
        self.digest = publish_weights(
            self.engine,
            version,
            sender=self._group,
            wire_dtype=self.wire_dtype,
            timeout_s=self.timeout_s,
            on_wait=self._wait_for_members,
        )
        received = self._collect("received", self._members)
        broken = [number for number in self._members if str(received.get(number, _FAILED)).startswith(_FAILED)]
        if broken:
            raise TransferError(f"engine {broken[0]}: {received.get(broken[0], 'no answer')}")
        refused = [number for number, digest in received.items() if digest != self.digest]
        for number in refused:
            self._refuse(number, version)
        return None if refused else 0 if is_trial else self.settle(version, self.digest)

    def _refuse(self, number: int, version: int) -> None:
        self._refusals[number] = self._refusals.get(number, 0) + 1
        what = (
            f"engine {number} received other bytes than were sent as version {version} (time {self._refusals[number]})"
        )
        print(what, flush=True)
        if self._refusals[number] > _REFUSALS_TO_RESTART:
            raise _HopelessError(f"{what}, although it was started again: memory or network of its node alter data.")
        if self._refusals[number] == _REFUSALS_TO_RESTART:
            self.store.set(f"restart/rollout.{number}", {"life": self._members[number], "why": what})

    def _announced(self) -> dict[int, int]:
        """Engines that can take part → their life: announced, not found dead, not about to be started again."""
        found: dict[int, int] = {}
        for number in range(self.num_engines):
            announced = self.store.get(f"engine/{number}")
            if announced is not None and self._is_there(number, announced["life"]):
                found[number] = announced["life"]
        return found

    def _is_there(self, number: int, life: int) -> bool:
        gone = self.store.get(f"gone/rollout.{number}")
        restart = self.store.get(f"restart/rollout.{number}")
        return (gone is None or gone < life) and (restart is None or restart["life"] < life)

    def _wait_for_members(self) -> None:
        self.on_wait()
        for number, life in self._members.items():
            gone = self.store.get(f"gone/rollout.{number}")
            if gone is not None and gone >= life:
                raise TransferError(f"engine {number} ended")

    def _collect(self, what: str, members: Mapping[int, int]) -> dict[int, Any]:
        """What members answer by the deadline; who is dead or silent is left out."""
        deadline = time.monotonic() + self.timeout_s
        answers: dict[int, Any] = {}
        while time.monotonic() < deadline:
            for number in members.keys() - answers.keys():
                answer = self.store.get(f"{what}/{self._serial}/{number}")
                if answer is not None:
                    answers[number] = answer
            if all(number in answers or not self._is_there(number, life) for number, life in members.items()):
                break
            self.on_wait()
            time.sleep(_POLL_S)
        return {number: answers[number] for number in members if number in answers}


class _HopelessError(TransferError):
    """Not to be tried again."""


@dataclass(slots=True)
class Subscriber:
    """The engine's half.

    Args:
        life: how often this engine was started before.
    """

    store: ControlStore
    engine: Engine
    number: int
    beat: Callable[[str], None]
    life: int = 0
    branch: int = 0
    digests: dict[int, str] = field(default_factory=dict[int, str])
    """Version → digest of the stream it came in."""
    has_weights: bool = False
    """It has a version of the run, and may generate. A trial is none, nor is what it read from the folder by itself."""
    _serial: int = -1

    def introduce(self, model: str = "") -> None:
        """Say that the engine is ready, with its answer to the probe under the weights it read from the folder.

        Args:
            model: identity of that folder.
        """
        self.store.set(f"engine/{self.number}", {"life": self.life, "probe": self._probe(), "model": model})

    def serve(self) -> None:
        """Take part in the publication that is asked for, if there is a new one; else return at once."""
        request = self.store.get("publish")
        if request is None and not self.has_weights:
            self._adopt()
        if request is None or request["serial"] == self._serial:
            return
        self._serial = request["serial"]
        if [self.number, self.life] not in request["candidates"]:
            return
        self.beat("receive weights")
        self.store.set(f"ack/{self._serial}/{self.number}", True)
        members = dict(self._wait(f"form/{self._serial}")["members"])
        if self.number not in members:
            return
        self.store.set(f"received/{self._serial}/{self.number}", digest := self._receive(request, members[self.number]))
        outcome = self._wait(f"outcome/{self._serial}")
        if outcome["verdict"] == "commit":
            self.engine.apply(request["version"])
            self.has_weights = not request["is_trial"]
            if self.has_weights:
                self.digests[request["version"]], self.branch = digest, outcome["branch"]
            self.beat("probe")
            began = time.monotonic()
            logprobs = self._probe()
            answer = {"logprobs": logprobs, "seconds": time.monotonic() - began}
            self.store.set(f"probe/{self._serial}/{self.number}", answer)

    def _adopt(self) -> None:
        adoption = self.store.get("adopt")
        if adoption is not None and [self.number, self.life] in adoption["engines"]:
            self.digests[adoption["version"]] = adoption["digest"]
            self.branch, self.has_weights = adoption["branch"], True

    def _receive(self, request: dict[str, Any], join: dict[str, Any] | None) -> str:
        """The digest of what arrived, or why nothing did."""
        try:
            if join is not None:
                self.engine.join(JoinRequest(**join))
            return self.engine.receive(request["version"], request["timeout_s"])
        except TransferError as error:
            return f"{_FAILED}{error}"

    def _probe(self) -> list[float]:
        tokens = self.store.wait("probe_tokens", math.inf, on_wait=lambda: self.beat("wait for the trainer"))
        return self.engine.score(tokens)

    def _wait(self, name: str) -> Any:
        """As long as it takes: the supervisor ends an engine whose trainer is gone."""
        return self.store.wait(name, math.inf, on_wait=lambda: self.beat("receive weights"))
