"""One rollout engine: lease a chunk, generate, seal it, announce it; take new weights between two engine steps."""

import json
import sys
import time
from dataclasses import dataclass, field

from towline.jobs.asked_waves import asked_chunks
from towline.jobs.leases import Leases
from towline.jobs.role import Role, run_role
from towline.jobs.weight_sync import Subscriber
from towline.jobs.work import Workload, evaluation_work, training_work
from towline.rollout.engine import Engine
from towline.rollout.sampling import ChunkInFlight, SamplingSettings
from towline.rollout.tokenizing import PromptTokenizer
from towline.storage.checkpoints import model_identity
from towline.storage.ledger import read_shard, seal_shard
from towline.storage.records import ChunkId, ShardOrigin
from towline.storage.set_aside import aside_path, note_duplicate

PROBE_TOKENS = 256
_IDLE_S = 0.01


def serve_run(role: Role, engine_number: int) -> None:
    training = training_work(role.circle, role.run)
    evaluation = evaluation_work(role.circle, role.run)
    tokenizers = {
        work.name: PromptTokenizer(role.circle.policy.folder, chat=work.chat) for work in (training, evaluation) if work
    }
    role.heartbeat.beat("load")
    engine = load_engine(role, context_tokens(role, training, tokenizers[training.name]))
    subscriber = Subscriber(role.store, engine, engine_number, role.heartbeat.beat, role.life)
    subscriber.introduce(model_identity(role.circle.policy.folder))
    worker = _Worker(role, engine_number, engine, subscriber, training, evaluation, tokenizers)
    while not role.is_finished:
        if not worker.needs_these_weights:
            subscriber.serve()
        worker.lease()
        # Not with the weights of a trial.
        if worker.in_flight and subscriber.has_weights:
            role.heartbeat.beat("generate")
            worker.step()
        else:
            role.heartbeat.beat("wait for work")
            time.sleep(_IDLE_S)
    engine.close()


def context_tokens(role: Role, work: Workload, tokenizer: PromptTokenizer) -> int:
    """Longest prompt plus completion, and room for the probe text where the model has it."""
    rollout = role.circle.rollout
    config = json.loads((role.circle.policy.folder / "config.json").read_text())
    model_limit = config.get("max_position_embeddings", sys.maxsize)
    if rollout.max_context_tokens is not None:
        return min(rollout.max_context_tokens, model_limit)
    longest = max(len(tokenizer.encode(prompt.text)) for prompt in work.data.prompts)
    return min(max(longest + rollout.max_completion_tokens, PROBE_TOKENS + 1), model_limit)


def load_engine(role: Role, max_context_tokens: int) -> Engine:
    rollout = role.circle.rollout
    if rollout.engine == "scripted":
        from towline.rollout.scripted_engine import ScriptedEngine, noise_script

        return ScriptedEngine(noise_script(vocabulary=32))
    from towline.rollout.vllm_engine import VllmEngine

    return VllmEngine(
        role.circle.policy.folder,
        precision=rollout.precision,
        max_context_tokens=max_context_tokens,
        max_sequences=rollout.max_sequences,
        kv_cache_gib=rollout.kv_cache_gib,
        gpu_memory=rollout.gpu_memory,
        threads=role.circle.local.engine_threads,
    )


@dataclass(slots=True)
class _Worker:
    role: Role
    number: int
    engine: Engine
    subscriber: Subscriber
    training: Workload
    evaluation: Workload | None
    tokenizers: dict[str, PromptTokenizer]
    in_flight: list[tuple[Workload, ChunkInFlight]] = field(default_factory=list)
    leases: Leases = field(init=False)
    _step: int = -1
    """The step whose chunks are looked through; earlier ones are all taken."""

    def __post_init__(self) -> None:
        self.leases = Leases(self.role.store, self.role.process, self.role.life)

    @property
    def needs_these_weights(self) -> bool:
        """An evaluation is of one version, and so is a chunk whose bits must not depend on when weights arrive."""
        return any(work is self.evaluation or self.role.circle.deterministic for work, _ in self.in_flight)

    def lease(self) -> None:
        """Take chunks for as long as sequences are free: evaluations first, then the earliest step that is due."""
        is_deterministic = self.role.circle.deterministic
        # What the engine read from the model folder is no version of this run.
        while self.subscriber.has_weights and self.engine.num_unfinished < self.role.circle.rollout.max_sequences:
            if self.role.is_stopping or (is_deterministic and self.in_flight):
                return
            claimed = self._claim_evaluation() or self._claim_training()
            if claimed is None:
                return
            if is_deterministic:
                # What is cached, and in which batches a chunk is computed, depends on the chunks before it.
                self.engine.reset_cache()
            self._begin(*claimed)

    def step(self) -> None:
        for generated in self.engine.step():
            next(flight for _, flight in self.in_flight if flight.take(generated))
        for work, flight in [item for item in self.in_flight if item[1].is_complete]:
            self._seal(work, flight)
            self.in_flight.remove((work, flight))

    def _claim_evaluation(self) -> tuple[Workload, ChunkId, tuple[int, ...]] | None:
        request = self.role.store.get("evaluate")
        if request is None or self.evaluation is None or request["version"] != self.engine.version:
            return None
        return self._claim(self.evaluation, request["version"])

    def _claim_training(self) -> tuple[Workload, ChunkId, tuple[int, ...]] | None:
        start = self.role.store.get("start")
        if start is None:
            return None
        self._step = max(self._step, start["step"], self.role.store.get("training") or 0)
        last = min(self.engine.version + self.role.circle.rollout.max_staleness, self.role.circle.steps - 1)
        # Not `_step` itself: a chunk of the step that is trained may come back from an engine that died.
        for step in range(self._step, last + 1):
            claimed = self._claim(self.training, step)
            if claimed is not None:
                return claimed
        return None

    def _claim(self, work: Workload, step: int) -> tuple[Workload, ChunkId, tuple[int, ...]] | None:
        for chunk, rows in asked_chunks(self.role.store, work, step):
            if work.path(chunk).exists():
                self._announce(work, chunk)
            elif self.leases.take(work.lease(chunk)):
                return work, chunk, rows
        return None

    def _announce(self, work: Workload, chunk: ChunkId) -> None:
        """A shard that is there and not announced was sealed by an earlier attempt, or by an engine that died then."""
        name = f"{work.name}/sealed/{chunk}"
        if self.role.store.get(name) is None:
            self.role.store.set(name, read_shard(work.path(chunk)).digest)

    def _begin(self, work: Workload, chunk: ChunkId, rows: tuple[int, ...]) -> None:
        tokenizer = self.tokenizers[work.name]
        prompts = [work.data.prompts[row] for row in rows]
        flight = ChunkInFlight(
            chunk=chunk,
            prompts=prompts,
            prompt_token_ids=[tokenizer.encode(prompt.text) for prompt in prompts],
            settings=SamplingSettings(
                group_size=work.group_size,
                temperature=work.temperature,
                max_completion_tokens=work.max_completion_tokens,
                stop_token_ids=tuple(tokenizer.stop_token_ids),
                seed=self.role.circle.seed,
            ),
            name=f"{work.name}/{chunk}",
        )
        for request in flight.requests():
            self.engine.submit(request)
        self.in_flight.append((work, flight))

    def _seal(self, work: Workload, flight: ChunkInFlight) -> None:
        groups = flight.groups(self.tokenizers[work.name].decode)
        versions = {int(version) for group in groups for one in group.completions for version in one.versions}
        origin = ShardOrigin(
            chunk=flight.chunk,
            branch=self.subscriber.branch,
            engine=self.number,
            attempt=self.role.attempt,
            weight_hashes={version: self.subscriber.digests[version] for version in sorted(versions)},
            sampling={
                "temperature": work.temperature,
                "max_completion_tokens": work.max_completion_tokens,
                "group_size": work.group_size,
            },
            sampling_hash=work.sampling_hash,
            began=flight.began,
            ended=time.time(),
        )
        path = work.path(flight.chunk)
        try:
            digest = seal_shard(path, groups, origin)
        except FileExistsError:
            # We were taken for dead, and another engine was first.
            duplicate = aside_path(self.role.run, path)
            seal_shard(duplicate, groups, origin)
            note_duplicate(self.role.run, path, duplicate, self.role.attempt)
        else:
            self.role.store.set(f"{work.name}/sealed/{flight.chunk}", digest)
        self.leases.done(work.lease(flight.chunk))


def main() -> None:
    number = int(sys.argv[1])
    run_role(f"rollout.{number}", lambda role: serve_run(role, number))


if __name__ == "__main__":
    main()
