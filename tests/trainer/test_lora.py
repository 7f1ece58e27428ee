"""Adapters: their gradients on paper, what of them leaves the trainer, and that a resume brings them back to the bit.

The second half trains under a real mpirun: lora_worker.py trains and saves in one launch for each number of ranks, and
loads in another."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from launches import launch_ranks, wait_for_all
from tiny_models import sharded_llama
from towline.storage.errors import ModelError
from towline.trainer.config import LoraConfig
from towline.trainer.head_check import check_head
from towline.trainer.isolation import assert_isolated
from towline.trainer.lora import Weight, adapter_parameters, adapters_off, model_weights
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.policy import load_policy

WORKER = Path(__file__).parent / "lora_worker.py"
LAUNCH_TIMEOUT_S = 400
TEMPERATURE, BETA, SCALE = 0.7, 0.1, 2.0
LORA = LoraConfig(rank=4, alpha=8)
HEAD = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "lm_head"))
LINEAR = 7
"""Linear layers of a Llama layer."""


def tiny_llama(seed, *, tied):
    model = sharded_llama(seed, tied=tied)
    # Some models have such zeros; a digest tells them from 0.0.
    model.model.layers[0].mlp.up_proj.weight.data[:3, :5] = -0.0
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1600)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, tied in (("tied", True), ("untied", False)):
        tiny_llama(0, tied=tied).save_pretrained(folder / name)
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder / name)
    return folder


def adapted(folder, lora=LORA, precision="float64", **options):
    """A policy whose adapters are all in use."""
    policy = load_policy(folder, temperature=TEMPERATURE, precision=precision, lora=lora, **options)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter_parameters(policy.model).values():
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.1).to(parameter.dtype)
    return policy


def base(folder, precision="float64"):
    return load_policy(folder, temperature=TEMPERATURE, precision=precision)


def dense(folder, policy):
    """A policy without adapters that has the merged weights, computed here in float64."""
    merged = base(folder)
    weights = dict(merged.model.named_parameters())
    for weight in model_weights(policy.model):
        if weight.a_RI is not None:
            weights[weight.name].data = (weight.base + SCALE * weight.b_OR @ weight.a_RI).detach()
    return merged


def batch():
    rng = np.random.default_rng(0)
    lengths = (9, 20, 14)
    return pack([TokenSequence(token_ids=rng.integers(0, 1600, n), num_prompt_tokens=3) for n in lengths])


def loss(policy):
    logprobs_N = policy(batch())[0]
    return (logprobs_N * torch.linspace(-0.3, 1, len(logprobs_N), dtype=logprobs_N.dtype)).sum()


# --- on paper ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "lora"), [("tied", LORA), ("untied", LORA), ("untied", HEAD)])
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_gradients_of_both_factors_are_those_of_the_merged_weight(folder, model, lora, gradient_checkpointing):
    policy = adapted(folder / model, lora, gradient_checkpointing=gradient_checkpointing).train()
    merged = dense(folder / model, policy)
    loss(policy).backward()
    loss(merged).backward()
    of_merged = {name: weight.grad for name, weight in merged.model.named_parameters()}
    weights = [weight for weight in model_weights(policy.model) if weight.a_RI is not None]
    assert len(weights) == (2 * LINEAR if lora is LORA else 3)
    for weight in weights:
        gradient_OI = of_merged[weight.name]
        assert gradient_OI.abs().max() > 1e-3
        a_RI, b_OR = weight.a_RI.detach(), weight.b_OR.detach()
        torch.testing.assert_close(weight.a_RI.grad, SCALE * b_OR.T @ gradient_OI, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(weight.b_OR.grad, SCALE * gradient_OI @ a_RI.T, rtol=1e-9, atol=1e-12)
    assert all(weight.base.grad is None for weight in model_weights(policy.model))


@pytest.mark.parametrize(("model", "lora"), [("tied", LORA), ("untied", LORA), ("untied", HEAD)])
def test_log_probs_are_those_of_the_merged_weights(folder, model, lora):
    policy = adapted(folder / model, lora)
    found_N, wanted_N, base_N = (
        one(batch())[0].detach() for one in (policy, dense(folder / model, policy), base(folder / model))
    )
    torch.testing.assert_close(found_N, wanted_N, rtol=0, atol=1e-10)
    assert (found_N - base_N).abs().max() > 0.1


@pytest.mark.parametrize(("model", "lora"), [("tied", LORA), ("untied", HEAD)])
def test_adapters_that_are_in_use_pass_the_proofs_of_packing_and_head(folder, model, lora):
    policy = adapted(folder / model, lora, "float32")
    assert_isolated(policy.model)
    check_head(policy.model, torch.arange(1, 18))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model", "lora"), [("tied", LORA), ("untied", HEAD)])
def test_without_its_adapters_a_policy_is_the_model_folder_to_the_bit(folder, model, lora, precision):
    policy = adapted(folder / model, lora, precision)
    with torch.no_grad():
        (wanted_N, _), (own_N, _) = base(folder / model, precision)(batch()), policy(batch())
        with adapters_off(policy.model):
            found_N, _ = policy(batch())
        again_N, _ = policy(batch())
    assert torch.equal(found_N, wanted_N)
    assert torch.equal(again_N, own_N)
    assert not torch.equal(own_N, wanted_N)
    assert all(parameter.requires_grad for parameter in adapter_parameters(policy.model).values())


def test_a_new_policy_is_the_model_folder_to_the_bit_also_where_it_has_negative_zeros(folder):
    policy = load_policy(folder / "tied", temperature=1.0, precision="bfloat16", lora=LORA)
    stored = load_file(folder / "tied" / "model.safetensors")
    weights = model_weights(policy.model)
    assert {weight.name for weight in weights} == stored.keys()
    for weight in weights:
        wanted = stored[weight.name].bfloat16()
        assert torch.equal(weight.merged().view(torch.int16), wanted.view(torch.int16)), weight.name
    assert (stored["model.layers.0.mlp.up_proj.weight"][:3, :5].signbit()).all()


def test_only_the_factors_are_trained(folder):
    policy = load_policy(folder / "tied", temperature=1.0, precision="float32", lora=LORA)
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    # rank x (inputs + outputs) of q and o, k and v, the three of the MLP; in two layers
    assert trained == 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 1600))
    assert all(name.startswith("base_model.model.model.layers") for name in adapter_parameters(policy.model))


def test_a_merge_in_bfloat16_rounds_once():
    """The products are 2^-8, half of bfloat16's step beside 1, and 2^-17. Their sum in bfloat16 would be 2^-8, and
    1 + 2^-8 would be 1 again."""
    one = nn.Parameter(torch.ones(1, 1, dtype=torch.bfloat16))
    factors = torch.tensor([[2.0**-8], [2.0**-17]], dtype=torch.bfloat16)
    weight = Weight(
        name="w", base=one, a_RI=nn.Parameter(factors), b_OR=nn.Parameter(torch.ones(1, 2).bfloat16()), scale=1.0
    )
    assert weight.merged().item() == 1 + 2**-7
    assert one.item() == 1


@pytest.mark.parametrize(
    ("model", "target", "reason"),
    [
        ("tied", "lm_head", "the head of policy.model .* of the embeddings too .tied.*Leave it out"),
        ("tied", "query", '"query" names no linear layer of .*: down_proj, gate_proj, k_proj, lm_head, o_proj'),
        ("tied", "embed_tokens", '"embed_tokens" names no linear layer'),
        ("tied", "proj", '"proj" names no linear layer'),
    ],
)
def test_targets_that_cannot_have_an_adapter_are_refused(folder, model, target, reason):
    lora = LoraConfig(target_modules=("q_proj", target))
    with pytest.raises(ModelError, match=reason):
        load_policy(folder / model, temperature=1.0, precision="float32", lora=lora)


def test_a_model_without_linear_layers_is_refused(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=32, n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="has no linear layers beside its head"):
        load_policy(tmp_path, temperature=1.0, precision="float32", lora=LoraConfig())


# --- under mpirun ------------------------------------------------------------------------------------------------

slow = [pytest.mark.slow, pytest.mark.timeout(600)]
SAVED = ["zero0", "zero1", "zero2", "zero3", "bfloat16-zero2", "bfloat16-zero3", "head-zero3"]
every_saved_case = pytest.mark.parametrize("case", SAVED)
every_change = pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), (1, 2)])


def under_mpirun(test):
    for mark in slow:
        test = mark(test)
    return test


class Found:
    """What the workers left, by phase, number of ranks and case."""

    def __init__(self, folder):
        self.folder = folder

    def values(self, phase, ranks, name):
        return json.loads((self.folder / f"{phase}-{ranks}" / f"{name}.json").read_text())

    def arrays(self, phase, ranks, name):
        with np.load(self.folder / f"{phase}-{ranks}" / f"{name}.npz") as stored:
            return dict(stored)

    def checkpoint(self, case, ranks):
        return self.folder / "checkpoints" / f"{case}-by{ranks}" / "step-000005"


def examples():
    """Six sequences, and what their completion tokens weigh in the worker's loss: all different, of both signs."""
    rng = np.random.default_rng(0)
    return [
        (
            TokenSequence(token_ids=rng.integers(0, 1600, length), num_prompt_tokens=3),
            np.linspace(-0.3, 1, length - 3, dtype=np.float32) * (1 + number) / 50,
        )
        for number, length in enumerate(range(8, 20, 2))
    ]


@pytest.fixture(scope="module")
def found(folder):
    (folder / "examples.pkl").write_bytes(pickle.dumps(examples()))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    for phase in ("save", "load"):
        logs = {ranks: folder / f"{phase}-{ranks}.log" for ranks in (1, 2)}
        launches = {log: launch_ranks(WORKER, ranks, log, phase, folder, address) for ranks, log in logs.items()}
        wait_for_all(launches, LAUNCH_TIMEOUT_S)
    return Found(folder)


def part(arrays, prefix):
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def assert_same_bits(found, wanted):
    assert wanted
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def largest_difference(found, wanted):
    """Over all tensors, the largest difference relative to the largest number of that tensor."""
    assert wanted
    assert found.keys() == wanted.keys()
    return max(np.abs(found[name] - wanted[name]).max() / np.abs(wanted[name]).max() for name in wanted)


def plain_gradients(folder, arrays):
    """The worker's step in plain torch: no packing, no adapters, no DeepSpeed. Loss, norm, and gradients of A and B."""
    merged, other = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for _ in range(2))
    weights = dict(merged.named_parameters())
    adapters = part(arrays, "before/adapter/base_model.model.")
    factors = {
        name.removesuffix(".lora_A.weight"): (
            torch.from_numpy(adapters[name]).double(),
            torch.from_numpy(adapters[name.replace("lora_A", "lora_B")]).double(),
        )
        for name in adapters
        if name.endswith("lora_A.weight")
    }
    for name, (a_RI, b_OR) in factors.items():
        weights[f"{name}.weight"].data += SCALE * b_OR @ a_RI
    total = 0
    for sequence, weights_N in examples():
        ids_T = torch.from_numpy(sequence.token_ids)
        own_N, other_N = (
            torch.log_softmax(model(input_ids=ids_T[None]).logits[0] / TEMPERATURE, -1)[2:-1].gather(
                -1, ids_T[3:, None]
            )[:, 0]
            for model in (merged, other)
        )
        ratio_N = other_N.detach() - own_N
        kl = BETA / 50 * (ratio_N.exp() - ratio_N - 1).sum()
        total = total - (torch.from_numpy(weights_N) * own_N).sum() + kl
    total.backward()
    gradients = {}
    for name, (a_RI, b_OR) in factors.items():
        gradient_OI = weights[f"{name}.weight"].grad
        gradients[f"base_model.model.{name}.lora_A.weight"] = (SCALE * b_OR.T @ gradient_OI).numpy()
        gradients[f"base_model.model.{name}.lora_B.weight"] = (SCALE * gradient_OI @ a_RI.T).numpy()
    norm = np.sqrt(sum((gradient**2).sum() for gradient in gradients.values()))
    return total.item(), norm, gradients


@pytest.fixture(scope="module")
def plain(found):
    return {
        kind: plain_gradients(found.folder / model, found.arrays("save", 1, case))
        for kind, model, case in (("all", "tied", "zero0"), ("head", "untied", "head-zero3"))
    }


@under_mpirun
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "case",
    ["zero0", "zero1", "zero2", "zero3", "micro-zero2", "micro-zero3", "checkpointing-zero3", "head-zero3"],
)
def test_a_step_of_adapters_has_the_gradients_on_paper_however_it_is_split(found, plain, case, ranks):
    loss, norm, gradients = plain["head" if case.startswith("head") else "all"]
    values, arrays = found.values("save", ranks, case), found.arrays("save", ranks, case)
    assert values["loss"] == pytest.approx(loss, rel=1e-5)
    assert values["norm"] == pytest.approx(norm, rel=1e-5)
    assert largest_difference(part(arrays, "gradient/"), gradients) < 2e-5


@under_mpirun
@every_saved_case
def test_the_reference_is_the_model_folder_and_stays_it(found, case):
    arrays = found.arrays("save", 2, case)
    precision, model = "bfloat16" if case.startswith("b") else "float32", "untied" if "head" in case else "tied"
    with torch.no_grad():
        wanted_N = (
            base(found.folder / model, precision)(
                pack([TokenSequence(token_ids=np.arange(1, 30), num_prompt_tokens=1)])
            )[0]
            .float()
            .numpy()
        )
    for moment in ("before", "0", "1", "2"):
        np.testing.assert_array_equal(arrays[f"{moment}/reference"], wanted_N)
    assert np.abs(arrays["2/logprobs"] - wanted_N).max() > 0.1


@under_mpirun
@every_saved_case
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_leave_merged_under_the_names_of_the_model_folder(found, case, ranks):
    arrays = found.arrays("save", ranks, case)
    dtype = torch.bfloat16 if case.startswith("b") else torch.float32
    stored = load_file(found.folder / ("untied" if "head" in case else "tied") / "model.safetensors")
    adapters = part(arrays, "2/adapter/base_model.model.")
    changed = {name.removesuffix(".lora_A.weight") for name in adapters if name.endswith("lora_A.weight")}
    weights = part(arrays, "2/weight/")
    assert weights.keys() == stored.keys()
    for name, found_OI in weights.items():
        wanted_OI = stored[name].to(dtype).float()
        layer = name.removesuffix(".weight")
        if layer in changed:
            a_RI, b_OR = (torch.from_numpy(adapters[f"{layer}.lora_{factor}.weight"]) for factor in "AB")
            wanted_OI = (wanted_OI + SCALE * (b_OR @ a_RI)).to(dtype).float()
        np.testing.assert_allclose(found_OI, wanted_OI, rtol=0, atol=1e-6 if dtype is torch.float32 else 0)


@under_mpirun
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_policy_publishes_the_stream_of_the_model_folder(found, stage, ranks):
    values = found.values("save", ranks, f"fresh-zero{stage}")
    adapted_digests, plain_digests = values["digests"]
    assert adapted_digests == plain_digests
    assert len(set(adapted_digests)) == 2
    assert values["same_metas"]
    assert not set(values["later"]) & set(adapted_digests)


@under_mpirun
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_moments_are_kept_for_adapters_alone_and_a_step_is_seen_to_move_them(found, stage, ranks):
    values = found.values("save", ranks, f"fresh-zero{stage}")
    trained = 2 * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 1600))
    # ZeRO pads to the ranks
    assert 2 * trained <= values["held"] <= 2 * trained + 64
    before, after = values["mean_square"]
    # Of the factors, B has moved from 0 by the learning rate, 1e-3.
    assert after - before > 1e-7


@under_mpirun
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_perturbation_reaches_every_weight_that_leaves_and_comes_back_to_the_bit(found, stage):
    arrays = found.arrays("save", 2, f"perturbed-zero{stage}")
    before, inside, after = (part(arrays, f"{when}/") for when in ("before", "inside", "after"))
    assert_same_bits(after, before)
    assert np.abs(inside["logprobs"] - before["logprobs"]).max() > 0.05
    for name in part(before, "weight/"):
        assert (inside[f"weight/{name}"] != before[f"weight/{name}"]).any(), name
    assert_same_bits(part(inside, "adapter/"), part(before, "adapter/"))


# --- checkpoints -------------------------------------------------------------------------------------------------


@under_mpirun
@every_saved_case
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_equals_the_undisturbed_one_to_the_bit(found, case, ranks):
    straight = {
        name: array for name, array in found.arrays("save", ranks, case).items() if name.startswith(("0/", "1/", "2/"))
    }
    assert_same_bits(found.arrays("load", ranks, f"{case}-by{ranks}"), straight)
    assert found.values("load", ranks, f"{case}-by{ranks}")["steps"] == found.values("save", ranks, case)["steps"]
    moved = [
        np.abs(straight[f"2/{name}"] - array).max() for name, array in part(straight, "0/").items() if "lora" in name
    ]
    assert min(moved) > 1e-4


@under_mpirun
@every_saved_case
@every_change
def test_another_number_of_ranks_takes_up_the_same_adapters_and_goes_on_nearly_as_before(
    found, case, saved_by, loaded_by
):
    saved = found.arrays("save", saved_by, case)
    loaded = found.arrays("load", loaded_by, f"{case}-by{saved_by}")
    assert_same_bits(part(loaded, "0/adapter/"), part(saved, "0/adapter/"))
    assert_same_bits(part(loaded, "0/weight/"), part(saved, "0/weight/"))
    wanted = found.values("save", saved_by, case)["steps"]
    got = found.values("load", loaded_by, f"{case}-by{saved_by}")["steps"]
    relative = 2e-2 if case.startswith("b") else 1e-4
    assert np.array(got).ravel() == pytest.approx(np.array(wanted).ravel(), rel=relative)


@under_mpirun
@every_saved_case
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_holds_the_merged_model_and_the_adapters_for_peft(found, case, ranks):
    arrays, folder = found.arrays("save", ranks, case), found.checkpoint(case, ranks)
    own_N = arrays["0/logprobs"]
    original = found.folder / ("untied" if "head" in case else "tied")
    merged = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32, local_files_only=True)
    with_adapters = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32), folder / "adapter"
    )
    plain = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    stored = load_file(folder / "hf" / "model.safetensors")
    assert_same_bits({name: array.float().numpy() for name, array in stored.items()}, part(arrays, "0/weight/"))
    ids_T = torch.arange(1, 30)

    def logprobs(model):
        with torch.no_grad():
            logits_TV = model.eval()(input_ids=ids_T[None]).logits[0, :-1] / TEMPERATURE
        return torch.log_softmax(logits_TV, -1).gather(-1, ids_T[1:, None])[:, 0].numpy()

    bound = 0.2 if case.startswith("b") else 1e-5
    np.testing.assert_allclose(logprobs(merged), own_N, rtol=0, atol=bound)
    np.testing.assert_allclose(logprobs(with_adapters), own_N, rtol=0, atol=bound)
    assert np.abs(logprobs(plain) - own_N).max() > 2 * bound


@under_mpirun
def test_frozen_weights_are_not_kept_with_the_optimiser(found):
    for stage, share in ((1, 0.6), (2, 0.6), (3, 0.1)):
        folder = found.checkpoint(f"zero{stage}", 1)
        kept = sum(file.stat().st_size for file in (folder / "engine").rglob("*.pt") if "model_states" in file.name)
        assert kept < share * (folder / "hf" / "model.safetensors").stat().st_size
