"""DeepSpeed over NCCL with one rank: a training step on a GPU is the one on paper."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from scored_groups import completion, scored_group
from towline.trainer.config import LoraConfig, TrainerConfig
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.policy import load_policy

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("trainer_group")]

TEMPERATURE = 0.7


@pytest.fixture(scope="session")
def trainer_group():
    """For the whole session: DeepSpeed keeps hold of the first group that it sees."""
    torch.cuda.set_device(0)
    patch = pytest.MonkeyPatch()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        patch.setenv(name, value)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    patch.undo()


def groups(folder):
    """Two prompts with four completions; old log-probs are the policy's own."""
    rng = np.random.default_rng(0)
    policy = load_policy(folder, temperature=TEMPERATURE, precision="float32")
    found = []
    for row in range(2):
        prompt, completions = rng.integers(3, 1600, 5), []
        for length in (20, 7, 31, 12):
            token_ids = rng.integers(3, 1600, length)
            sequence = TokenSequence(token_ids=np.concatenate([prompt, token_ids]), num_prompt_tokens=len(prompt))
            with torch.no_grad():
                completions.append(completion(token_ids, policy(pack([sequence]))[0].cpu().numpy()))
        found.append(scored_group(prompt, completions, [0.0, 1.0, 1.0, 0.0], row=row))
    return found


def train_one_step(folder, precision, zero_stage):
    from towline.trainer.deepspeed_engine import DeepSpeedEngine
    from towline.trainer.grpo import take_inner_steps
    from towline.trainer.reference import Reference

    config = TrainerConfig(learning_rate=1e-3, precision=precision, zero_stage=zero_stage, max_tokens_per_microbatch=64)
    engine = DeepSpeedEngine(load_policy(folder, temperature=TEMPERATURE, precision=precision), config)
    reference = Reference(folder, config, temperature=TEMPERATURE)
    batch = pack([TokenSequence(token_ids=np.arange(3, 60), num_prompt_tokens=1)])
    before = engine.evaluate(batch)
    with engine.perturbed(seed=1, size=0.05):
        assert (engine.evaluate(batch) - before).abs().max() > 0.01
    assert torch.equal(engine.evaluate(batch), before)
    metrics = take_inner_steps(
        engine, reference, config, groups(folder), step=0, seed=0, max_completion_tokens=40,
        on_progress=lambda phase: None,
    )  # fmt: skip
    with engine.gathered(range(len(engine.tensors()))) as tensors:
        return metrics, [tensor.float().cpu().clone() for tensor in tensors], (engine.evaluate(batch) - before).abs()


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_at_the_old_policy_has_the_loss_on_paper(model_folder, precision, zero_stage):
    metrics, weights, moved = train_one_step(model_folder, precision, zero_stage)
    # At ratio 1 the loss is minus the mean advantage over tokens: lengths 20, 7, 31, 12, advantages -1, 1, 1, -1.
    bound = 1e-4 if precision == "float32" else 2e-2
    assert metrics["loss/policy"] == pytest.approx(-(7 + 31 - 20 - 12) / 70, abs=bound)
    assert metrics["loss/kl"] == pytest.approx(0.0, abs=bound**2)
    assert metrics["mismatch/max_abs_logprob"] < (1e-4 if precision == "float32" else 0.3)
    assert metrics["loss/gradient_norm"] > 0.01
    assert all(weight.isfinite().all() for weight in weights)
    assert moved.max() > 1e-3


@pytest.mark.parametrize("zero_stage", [0, 2, 3])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_adapters_train_beside_the_model_folder_which_stays_the_reference(model_folder, precision, zero_stage):
    from towline.trainer.deepspeed_engine import DeepSpeedEngine
    from towline.trainer.reference import Reference

    lora = LoraConfig(rank=4, alpha=8)
    config = TrainerConfig(learning_rate=1e-2, precision=precision, zero_stage=zero_stage, lora=lora)
    torch.manual_seed(0)
    policy = load_policy(model_folder, temperature=TEMPERATURE, precision=precision, lora=lora)
    engine = DeepSpeedEngine(policy, config)
    reference = Reference(model_folder, config, temperature=TEMPERATURE, adapted=engine)
    batch = pack([TokenSequence(token_ids=np.arange(3, 60), num_prompt_tokens=1)])
    (before,) = reference.logprobs([batch])
    assert torch.equal(engine.evaluate(batch), before)
    for _ in range(2):
        engine.backward(-engine.forward(batch)[0].mean(), is_last=True)
        engine.step(1e-2)
    own = engine.evaluate(batch)
    assert (own - before).abs().max() > 1e-2
    assert torch.equal(reference.logprobs([batch])[0], before)
    merged = load_policy(model_folder, temperature=TEMPERATURE, precision=precision)
    with engine.gathered(range(len(engine.tensors()))) as tensors, torch.no_grad():
        for weight, tensor in zip(merged.model.parameters(), tensors, strict=True):
            weight.copy_(tensor)
        bound = 1e-3 if precision == "float32" else 0.5
        assert (merged(batch)[0] - own).abs().max() < bound


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_zero_stages_train_to_the_same_gradient_norm(model_folder, zero_stage):
    found, wanted = (train_one_step(model_folder, "float32", stage)[0] for stage in (zero_stage, 0))
    assert found["loss/gradient_norm"] == pytest.approx(wanted["loss/gradient_norm"], rel=1e-4)
