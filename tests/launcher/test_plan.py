from dataclasses import replace

import pytest

from towline.launcher.model_folder import ModelSizes
from towline.launcher.plan import (
    GIB,
    MIB,
    activation_bytes,
    checkpoint_bytes,
    kv_bytes_per_token,
    logprob_bytes,
    make_plan,
    reference_bytes,
    shard_bytes,
    size_text,
    trainer_state,
)

BILLION = 10**9
SIZES = ModelSizes(
    num_parameters=7 * BILLION,
    num_layers=32,
    num_kv_heads=32,
    head_dim=128,
    hidden_size=4096,
    vocabulary=32_000,
    num_embedding_parameters=2 * 32_000 * 4096,
    max_positions=4096,
)


def test_mixed_precision_adamw_is_16_bytes_a_parameter() -> None:
    state = trainer_state(1, "bfloat16", zero_stage=0, num_ranks=1)
    assert (state.weights, state.gradients, state.master, state.moments) == (2, 2, 4, 8)
    assert trainer_state(7 * BILLION, "bfloat16", zero_stage=0, num_ranks=1).total == 112 * BILLION


def test_float32_adamw_is_16_bytes_a_parameter_and_zero_adds_master_weights() -> None:
    assert trainer_state(1, "float32", zero_stage=0, num_ranks=1).total == 4 + 4 + 8
    assert trainer_state(1, "float32", zero_stage=2, num_ranks=1).total == 4 + 4 + 4 + 8


@pytest.mark.parametrize(
    ("stage", "bytes_of_8_parameters"),
    [(0, 16 + 16 + 32 + 64), (1, 16 + 16 + 8 + 16), (2, 16 + 4 + 8 + 16), (3, 4 + 4 + 8 + 16)],
)
def test_each_zero_stage_shards_more_over_4_ranks(stage: int, bytes_of_8_parameters: int) -> None:
    assert trainer_state(8, "bfloat16", zero_stage=stage, num_ranks=4).total == bytes_of_8_parameters


def test_a_share_is_rounded_up() -> None:
    assert trainer_state(3, "bfloat16", zero_stage=3, num_ranks=4).weights == 2


def test_the_reference_is_weights_only_and_sharded_at_stage_3() -> None:
    assert reference_bytes(8, "bfloat16", zero_stage=2, num_ranks=4) == 16
    assert reference_bytes(8, "bfloat16", zero_stage=3, num_ranks=4) == 4


def test_an_int8_reference_is_a_byte_a_parameter_but_for_the_embeddings() -> None:
    options = {"home": "int8", "num_embedding_parameters": 3}
    assert reference_bytes(8, "bfloat16", 2, 4, **options) == 5 * 1 + 3 * 2
    assert reference_bytes(8, "float32", 2, 4, **options) == 5 * 1 + 3 * 4


@pytest.mark.parametrize(("stage", "share"), [(2, 16), (3, 4)])
def test_an_offloaded_reference_is_as_large_and_as_sharded_as_one_on_the_device(stage: int, share: int) -> None:
    assert reference_bytes(8, "bfloat16", stage, 4, home="offloaded") == share


def test_a_kv_cache_token_of_a_7b_llama_is_half_a_mebibyte() -> None:
    assert kv_bytes_per_token(32, 32, 128, "bfloat16") == 524_288
    assert kv_bytes_per_token(32, 8, 128, "bfloat16") == 524_288 // 4
    assert kv_bytes_per_token(32, 32, 128, "float32") == 2 * 524_288


def test_logprobs_of_256_completions_of_1024_tokens_are_one_mebibyte() -> None:
    assert logprob_bytes(256, 1024) == MIB


def test_activations_follow_the_stated_formula() -> None:
    logits = 2 * 1024 * 32_000 * 4
    kept = activation_bytes(SIZES, "bfloat16", 2048, gradient_checkpointing=False)
    assert kept == 34 * 2048 * 4096 * 32 + logits
    checkpointed = activation_bytes(SIZES, "bfloat16", 2048, gradient_checkpointing=True)
    assert checkpointed == 2 * 2048 * 4096 * 32 + 34 * 2048 * 4096 + logits


def test_shards_hold_17_bytes_a_token_and_the_files_own_structure() -> None:
    one_chunk = shard_bytes(2, 8, prompt_tokens=10, completion_tokens=100, chunk=2)
    assert one_chunk == 2 * (10 + 800) * 17 + 70 * 1024
    assert shard_bytes(2, 8, prompt_tokens=10, completion_tokens=100, chunk=1) == one_chunk + 70 * 1024


def test_a_checkpoint_holds_all_but_the_gradients() -> None:
    assert checkpoint_bytes(10, "bfloat16", zero_stage=2) == 140
    assert checkpoint_bytes(10, "float32", zero_stage=2) == 160


def test_a_checkpoint_holds_a_refreshed_reference_too() -> None:
    assert checkpoint_bytes(10, "bfloat16", zero_stage=2, has_refreshed_reference=True) == 140 + 20


def test_the_plan_of_an_experiment(project) -> None:
    _, experiment = project.read("trainer.precision='bfloat16'", "local.trainer_ranks=2", "local.engines=2")
    plan = make_plan(experiment, SIZES, prompt_tokens=10, num_held_out=2)
    assert plan.state == trainer_state(7 * BILLION, "bfloat16", 2, 2)
    assert plan.reference == plan.engine_weights == 14 * BILLION
    assert plan.kv_tokens == GIB // 524_288 == 2048
    assert plan.logprobs_per_step == 4 * 4 * 4
    # keep_checkpoints = 3, and a fourth while it is written.
    assert plan.kept_checkpoints == 4
    assert plan.disk == 3 * plan.shards_per_step + plan.evaluation_shards + 4 * 98 * BILLION
    assert plan.evaluation_shards == 2 * shard_bytes(2, 1, 10, 4, 32)
    assert plan.memory == 2 * plan.rank_bytes + 2 * plan.engine_bytes + 4 * GIB


def test_shards_are_planned_for_as_many_waves_as_a_step_may_have(project) -> None:
    _, experiment = project.read("rollout.prompts_per_step=1", "rollout.max_waves=3")
    plan = make_plan(experiment, SIZES, prompt_tokens=10, num_held_out=2)
    assert plan.shards_per_step == 3 * shard_bytes(1, 2, 10, 4, 1)
    # No more than a wave's is trained on.
    assert plan.logprobs_per_step == 1 * 2 * 4 * 4


def test_no_reference_is_planned_without_a_kl_term(project) -> None:
    _, experiment = project.read("trainer.kl_beta=0.0")
    assert make_plan(experiment, SIZES, prompt_tokens=1, num_held_out=0).reference == 0


def test_the_plan_knows_the_home_of_the_reference_and_whether_it_is_refreshed(project) -> None:
    _, experiment = project.read("trainer.precision='bfloat16'", "policy.reference=int8", "trainer.reference_every=2")
    plan = make_plan(experiment, SIZES, prompt_tokens=1, num_held_out=0)
    assert plan.reference == 7 * BILLION + 2 * 32_000 * 4096
    assert plan.checkpoint == (98 + 14) * BILLION
    _, experiment = project.read("trainer.precision='bfloat16'", "trainer.reference_every=1000")
    assert make_plan(experiment, SIZES, prompt_tokens=1, num_held_out=0).checkpoint == 98 * BILLION


def test_frozen_weights_take_their_own_bytes_and_no_others() -> None:
    state = trainer_state(8, "bfloat16", zero_stage=3, num_ranks=4, num_frozen=800)
    assert (state.weights, state.gradients, state.master, state.moments) == (404, 4, 8, 16)
    assert trainer_state(8, "bfloat16", zero_stage=2, num_ranks=4, num_frozen=800).weights == 1616
    assert checkpoint_bytes(10, "bfloat16", zero_stage=2, num_frozen=1000) == 2000 + 140


def test_the_plan_of_adapters_has_neither_moments_for_frozen_weights_nor_a_reference(project) -> None:
    sizes = replace(SIZES, layers={"layers.0.q_proj": (4096, 4096), "embed_tokens": (32_000, 4096)})
    _, experiment = project.read("trainer.precision='bfloat16'", "trainer.lora.rank=8", "trainer.zero_stage=0")
    plan = make_plan(experiment, sizes, prompt_tokens=1, num_held_out=0)
    assert plan.num_adapter_parameters == 8 * (4096 + 4096) == 65_536
    assert plan.state.total == 14 * BILLION + 16 * 65_536
    assert plan.reference == 0
    assert plan.checkpoint == 14 * BILLION + 14 * 65_536


def test_evaluations_between_are_counted(project) -> None:
    _, experiment = project.read("evaluation.every=1")
    one = shard_bytes(2, 1, 10, 4, 32)
    assert make_plan(experiment, SIZES, prompt_tokens=10, num_held_out=2).evaluation_shards == 4 * one


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1536, "1.50 KiB"), (15.2 * GIB, "15.2 GiB"), (2048 * GIB, "2,048 GiB")],
)
def test_sizes_read_with_three_figures(num_bytes: float, text: str) -> None:
    assert size_text(num_bytes) == text
