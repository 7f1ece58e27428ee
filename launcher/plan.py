"""How much memory and disk a run needs, by arithmetic alone. Every function is pure; sizes are in bytes."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from towline.jobs.experiment import ExperimentConfig, RolloutExperiment
from towline.jobs.work import EVALUATION_CHUNK_PROMPTS
from towline.launcher.model_folder import ModelSizes
from towline.trainer.config import EngineConfig, Home

GIB = 2**30
MIB = 2**20
Precision = Literal["float32", "bfloat16"]
WIDTH: dict[Precision, int] = {"float32": 4, "bfloat16": 2}
LOGIT_CHUNK_TOKENS = 1024
PROCESS_BYTES = 1 * GIB
"""An interpreter with torch and what it needs, beside what is counted here. With a model of next to nothing a trainer
rank took 0.5 GiB and an engine 1.7 GiB, its KV cache included."""
TEXT_BYTES_PER_TOKEN = 5
LEDGER_BYTES_PER_TOKEN = 4 + 4 + 4 + TEXT_BYTES_PER_TOKEN
"""Token id, log-prob, policy version, text; before compression."""
LEDGER_BYTES_PER_CHUNK = 70 * 1024
"""HDF5's own structure in a shard and its scores: measured on files with next to nothing in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """What one rank holds of weights, gradients, AdamW's state and float32 master weights."""

    weights: int
    gradients: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.master + self.moments


def trainer_state(
    num_parameters: int, precision: Precision, zero_stage: int, num_ranks: int, *, num_frozen: int = 0
) -> TrainerState:
    """Divide what AdamW needs over the ranks as ZeRO does.

    bfloat16: 2 weights + 2 gradients + 4 master weights + 8 moments = 16 bytes a parameter. float32: 4 + 4 + 8 = 16,
    the weights being their own master; but ZeRO keeps its shard of master weights beside them all the same (seen in
    its checkpoints). Stage 1 shards master weights and moments, 2 also gradients, 3 also weights.

    Args:
        num_frozen: parameters beside those that are trained: weights and nothing else.
    """
    width = WIDTH[precision]

    def share(bytes_per_parameter: int, from_stage: int, num_parameters: int = num_parameters) -> int:
        whole = num_parameters * bytes_per_parameter
        return -(-whole // num_ranks) if zero_stage >= from_stage else whole

    return TrainerState(
        weights=share(width, 3, num_parameters + num_frozen),
        gradients=share(width, 2),
        master=share(0 if precision == "float32" and zero_stage == 0 else 4, 1),
        moments=share(8, 1),
    )


def reference_bytes(
    num_parameters: int,
    precision: Precision,
    zero_stage: int,
    num_ranks: int,
    *,
    home: Home = "on_device",
    num_embedding_parameters: int = 0,
) -> int:
    """The reference of one rank: weights only, sharded where the policy's are.

    Offloaded they are as many, in main memory; on the device all of them (ZeRO-3: a layer's) for a moment each step,
    when no activations are kept. int8: one byte each, but embeddings and the output layer keep the precision; the
    scales, one an output channel, are not counted.
    """
    if home == "int8":
        return num_parameters + num_embedding_parameters * (WIDTH[precision] - 1)
    return trainer_state(num_parameters, precision, zero_stage, num_ranks).weights


def activation_bytes(
    sizes: ModelSizes, precision: Precision, max_tokens_per_microbatch: int, *, gradient_checkpointing: bool
) -> int:
    """Estimate what one packed forward pass keeps for its backward pass, with the log-probs' working memory.

    tokens * hidden * layers * 34 bytes at two bytes a value (Korthikanti et al. 2022, arXiv:2205.05198, eq. 2;
    attention scores are not kept); with gradient checkpointing each layer's input, and one layer's 34. To that, twice
    the float32 logits of a chunk of 1,024 tokens. Tokens are the packing budget, trainer.max_tokens_per_microbatch.
    """
    one_layer = max_tokens_per_microbatch * sizes.hidden_size * WIDTH[precision]
    layers = sizes.num_layers + 17 if gradient_checkpointing else 17 * sizes.num_layers
    logits = 2 * min(max_tokens_per_microbatch, LOGIT_CHUNK_TOKENS) * sizes.vocabulary * 4
    return one_layer * layers + logits


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, precision: Precision) -> int:
    """A key and a value of every layer and head: 524,288 bytes for 32 layers, 32 heads of 128, bfloat16."""
    return 2 * num_layers * num_kv_heads * head_dim * WIDTH[precision]


def logprob_bytes(num_completions: int, num_tokens: int) -> int:
    """Float32 log-probs of a step: 256 completions of 1,024 tokens are 1 MiB."""
    return num_completions * num_tokens * 4


def shard_bytes(num_prompts: int, group_size: int, prompt_tokens: int, completion_tokens: int, chunk: int) -> int:
    """Upper bound of what a step adds to the ledger; compression makes long completions two to three times smaller.

    Args:
        chunk: prompts of a shard.
    """
    num_tokens = num_prompts * (prompt_tokens + group_size * completion_tokens)
    return num_tokens * LEDGER_BYTES_PER_TOKEN + -(-num_prompts // chunk) * LEDGER_BYTES_PER_CHUNK


def checkpoint_bytes(
    num_parameters: int,
    precision: Precision,
    zero_stage: int,
    *,
    num_frozen: int = 0,
    has_refreshed_reference: bool = False,
) -> int:
    """All ranks together: weights, master weights and moments, but no gradients; and a refreshed reference's weights.

    The latter at most: checkpoints share the files of one refresh where the file system knows hard links. Frozen
    weights are there once, merged.
    """
    state = trainer_state(num_parameters, precision, zero_stage, 1, num_frozen=num_frozen)
    return state.weights * (2 if has_refreshed_reference else 1) + state.master + state.moments


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one run needs on one machine. What only engines need is 0 in a run without them."""

    num_parameters: int
    num_adapter_parameters: int | None
    """Which alone are trained with [trainer.lora]; None without it, or where the folder does not tell its layers: then
    `state` is of the frozen weights alone."""
    state: TrainerState
    """Of one rank."""
    reference: int = 0
    """Of one rank, wherever it lives."""
    activations: int
    """Of one rank, an estimate."""
    num_ranks: int
    engine_weights: int = 0
    """Of one engine."""
    kv_cache: int = 0
    """Of one engine."""
    kv_tokens: int = 0
    """Tokens that its KV cache holds."""
    kv_bytes_per_token: int = 0
    num_engines: int = 0
    reward_models: int = 0
    """Weights, in the scorer."""
    logprobs_per_step: int = 0
    shards_per_step: int = 0
    """Of all its waves, should it draw them all."""
    steps: int
    evaluation_shards: int = 0
    """Of all evaluations."""
    checkpoint: int
    """One checkpoint."""
    kept_checkpoints: int
    """Those kept, and the one being written before the oldest is removed."""
    num_processes: int
    num_runs: int = 1
    """One after the other, each with checkpoints of its own."""

    @property
    def rank_bytes(self) -> int:
        return self.state.total + self.reference + self.activations

    @property
    def engine_bytes(self) -> int:
        return self.engine_weights + self.kv_cache

    @property
    def memory(self) -> int:
        """All processes of the run together."""
        own = self.num_ranks * self.rank_bytes + self.num_engines * self.engine_bytes
        scorer = self.reward_models + PROCESS_BYTES if self.reward_models else 0
        return own + scorer + self.num_processes * PROCESS_BYTES

    @property
    def disk(self) -> int:
        return self.num_runs * (self.shards + self.kept_checkpoints * self.checkpoint)

    @property
    def in_each_run(self) -> str:
        """What stands before the parts of `disk` in a message."""
        return "" if self.num_runs == 1 else f"in each of {self.num_runs} runs "

    @property
    def shards(self) -> int:
        return self.steps * self.shards_per_step + self.evaluation_shards


def make_plan(
    experiment: RolloutExperiment, sizes: ModelSizes, *, prompt_tokens: int, num_held_out: int, reward_models: int = 0
) -> Plan:
    """
    Args:
        prompt_tokens: of a typical prompt.
        num_held_out: prompts of an evaluation.
        reward_models: bytes of the weights of the reward models that pay for rollouts.
    """
    trainer, rollout, local = experiment.trainer, experiment.rollout, experiment.local
    completion_tokens = rollout.max_completion_tokens
    per_token = kv_bytes_per_token(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim, rollout.precision)
    return dataclasses.replace(
        trainer_plan(experiment, sizes),
        engine_weights=sizes.num_parameters * WIDTH[rollout.precision],
        kv_cache=rollout.kv_cache_gib * GIB,
        kv_tokens=rollout.kv_cache_gib * GIB // per_token,
        kv_bytes_per_token=per_token,
        logprobs_per_step=logprob_bytes(rollout.prompts_per_step * rollout.group_size, completion_tokens),
        shards_per_step=rollout.max_waves
        * shard_bytes(
            rollout.prompts_per_step, rollout.group_size, prompt_tokens, completion_tokens, experiment.chunk_prompts
        ),
        evaluation_shards=_num_evaluations(experiment)
        * shard_bytes(num_held_out, 1, prompt_tokens, completion_tokens, EVALUATION_CHUNK_PROMPTS),
        num_engines=local.engines,
        reward_models=reward_models,
        num_processes=local.trainer_ranks + local.engines,
        reference=_reference(experiment, sizes),
        checkpoint=_checkpoint(experiment, sizes, has_refreshed=trainer.last_refresh(experiment.steps) is not None),
    )


def trainer_plan(experiment: ExperimentConfig, sizes: ModelSizes) -> Plan:
    """What the trainer's ranks need, and nobody else: all that a run on given examples has.

    A reward model's head, one number for each hidden dimension, is not counted, nor that it has no vocabulary.
    """
    trainer, ranks = experiment.trainer, experiment.local.trainer_ranks
    num_trained, num_frozen = _trained_and_frozen(trainer, sizes)
    return Plan(
        num_parameters=sizes.num_parameters,
        num_adapter_parameters=None if trainer.lora is None else sizes.adapter_parameters(trainer.lora),
        state=trainer_state(num_trained, trainer.precision, trainer.zero_stage, ranks, num_frozen=num_frozen),
        activations=activation_bytes(
            sizes,
            trainer.precision,
            trainer.max_tokens_per_microbatch,
            gradient_checkpointing=trainer.gradient_checkpointing,
        ),
        num_ranks=ranks,
        steps=experiment.steps,
        checkpoint=_checkpoint(experiment, sizes, has_refreshed=False),
        kept_checkpoints=min(trainer.keep_checkpoints, experiment.steps) + 1,
        num_processes=ranks,
    )


def _trained_and_frozen(trainer: EngineConfig, sizes: ModelSizes) -> tuple[int, int]:
    if trainer.lora is None:
        return sizes.num_parameters, 0
    return sizes.adapter_parameters(trainer.lora) or 0, sizes.num_parameters


def _reference(experiment: RolloutExperiment, sizes: ModelSizes) -> int:
    """Of one rank; with adapters it is the policy without them."""
    trainer = experiment.trainer
    if not trainer.has_reference_model or trainer.lora is not None:
        return 0
    return reference_bytes(
        sizes.num_parameters,
        trainer.precision,
        trainer.zero_stage,
        experiment.local.trainer_ranks,
        home=experiment.policy.reference,
        num_embedding_parameters=sizes.num_embedding_parameters,
    )


def _checkpoint(experiment: ExperimentConfig, sizes: ModelSizes, *, has_refreshed: bool) -> int:
    trainer = experiment.trainer
    num_trained, num_frozen = _trained_and_frozen(trainer, sizes)
    return checkpoint_bytes(
        num_trained,
        trainer.precision,
        trainer.zero_stage,
        num_frozen=num_frozen,
        has_refreshed_reference=has_refreshed,
    )


def _num_evaluations(experiment: RolloutExperiment) -> int:
    """One before the first step, one after the last, and those between."""
    if experiment.evaluation is None:
        return 0
    every = experiment.evaluation.every
    return 2 + ((experiment.steps - 1) // every if every else 0)


def size_text(num_bytes: float) -> str:
    """Three figures with a unit, such as 15.2 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1000 or unit == "GiB":
            break
        num_bytes /= 1024
    digits = 0 if unit == "B" or num_bytes >= 100 else 1 if num_bytes >= 10 else 2
    return f"{num_bytes:,.{digits}f} {unit}"
