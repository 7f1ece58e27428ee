"""The reference policy: no gradient goes through it, its homes agree, and a refreshed one survives a resume.

The second half trains two ranks under a real mpirun: reference_worker.py saves in one launch and resumes in others."""

import importlib.util
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from launches import launch_ranks, wait_for_all
from scored_groups import completion, scored_group
from tiny_models import sharded_llama
from towline.storage.errors import ModelError
from towline.trainer import int8
from towline.trainer.config import TrainerConfig
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.policy import load_policy
from towline.trainer.reference import Reference

HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
WORKER = Path(__file__).parent / "reference_worker.py"
LAUNCH_TIMEOUT_S = 500
STEPS, EVERY, SAVED = 6, 2, (2, 3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    sharded_llama(0).save_pretrained(folder)
    return folder


def config(**settings):
    return TrainerConfig(learning_rate=1e-3, **({"precision": "float32", "zero_stage": 0} | settings))


def batches(count=2, length=48):
    rng = np.random.default_rng(3)
    return [pack([TokenSequence(token_ids=rng.integers(0, 1600, length), num_prompt_tokens=2)]) for _ in range(count)]


# --- in this process ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["on_device", "offloaded"])
def test_no_gradient_flows_through_the_reference(model, home):
    reference = Reference(model, config(), temperature=0.7, home=home)
    policy = load_policy(model, temperature=0.7, precision="float32")
    (batch,) = batches(1)
    weights = list(reference._policy.parameters())
    assert not any(weight.requires_grad for weight in weights)
    for weight in weights:
        weight.requires_grad_(True)
    (answer_N,) = reference.logprobs([batch])
    logprobs_N = policy(batch)[0]
    difference_N = answer_N - logprobs_N + 0.5
    (difference_N.exp() - difference_N).sum().backward()
    assert all(weight.grad is None for weight in weights)
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in policy.parameters())
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(answer_N.sum(), weights)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_offloaded_reference_answers_as_one_on_the_device_to_the_bit(model, precision):
    here, there = (
        Reference(model, config(precision=precision), temperature=0.7, home=home) for home in ("on_device", "offloaded")
    )
    wanted = here.logprobs(batches())
    assert len(wanted) == 2
    assert [len(logprobs_N) for logprobs_N in wanted] == [46, 46]
    for found_N, wanted_N in zip(there.logprobs(batches()), wanted, strict=True):
        assert found_N.dtype is torch.float32
        assert torch.equal(found_N, wanted_N)


def test_an_offloaded_reference_is_fetched_once_for_all_batches(model):
    reference = Reference(model, config(), temperature=0.7, home="offloaded")
    fetched = []

    def fetch(weight):
        fetched.append(weight)
        return weight.clone()

    assert reference._offloaded is not None
    reference._offloaded._fetch = fetch
    reference.logprobs(batches(3))
    assert len(fetched) == len(list(reference._policy.parameters()))


@needs_torchao
@pytest.mark.parametrize(("precision", "mean", "largest"), [("float32", 0.02, 0.1), ("bfloat16", 0.03, 0.2)])
def test_int8_is_nearly_full_precision_with_one_byte_a_linear_weight(model, precision, mean, largest):
    full = Reference(model, config(), temperature=1.0)
    rounded = Reference(model, config(precision=precision), temperature=1.0, home="int8")
    error_N = torch.cat(rounded.logprobs(batches(8))) - torch.cat(full.logprobs(batches(8)))
    assert 0 < error_N.abs().mean() < mean
    assert error_N.abs().max() < largest
    weights = dict(rounded._policy.model.named_parameters())
    is_rounded = {name: hasattr(weight, "qdata") for name, weight in weights.items()}
    assert {name for name in weights if name.endswith("_proj.weight")} == {n for n, it in is_rounded.items() if it}
    assert weights["model.layers.0.mlp.up_proj.weight"].qdata.dtype is torch.int8
    assert weights["model.embed_tokens.weight"].dtype is getattr(torch, precision)


def test_int8_without_torchao_is_refused_with_what_to_do(model, monkeypatch):
    monkeypatch.setattr(int8, "is_torchao_available", lambda: False)
    with pytest.raises(ModelError, match=r'"int8" needs torchao, which is not installed here.*"offloaded"'):
        Reference(model, config(), temperature=1.0, home="int8")


# --- two ranks ---------------------------------------------------------------------------------------------------

RESUMED = [f"zero{stage}-float32-{home}" for stage in (0, 1, 2, 3) for home in ("on_device", "offloaded")]
RESUMED += ["zero2-bfloat16-offloaded", "zero3-bfloat16-offloaded"]
ROUNDED = [f"zero2-{precision}-int8" for precision in ("float32", "bfloat16")]
every_case = pytest.mark.parametrize("case", RESUMED + [pytest.param(case, marks=needs_torchao) for case in ROUNDED])
every_exact_case = pytest.mark.parametrize("case", RESUMED)


class Found:
    def __init__(self, folder):
        self.folder = folder

    def values(self, phase, name):
        return json.loads((self.folder / phase / f"{name}.json").read_text())

    def arrays(self, phase, name):
        with np.load(self.folder / phase / f"{name}.npz") as stored:
            return dict(stored)


def word_tokenizer():
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1600)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1")


def step_groups(step):
    """Two prompts with three completions each."""
    rng = np.random.default_rng(step)
    return [
        scored_group(
            rng.integers(0, 1600, 4),
            [completion(rng.integers(0, 1600, length), np.full(length, -7.0)) for length in (9, 4, 12)],
            [0.0, 1.0, 0.5],
            row=row,
        )
        for row in range(2)
    ]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    sharded_llama(0).save_pretrained(folder / "start")
    word_tokenizer().save_pretrained(folder / "start")
    (folder / "groups.pkl").write_bytes(pickle.dumps([step_groups(step) for step in range(STEPS)]))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = f"127.0.0.1:{store.port}"
    for phase, worlds in (("save", (2,)), ("load", (2, 1))):
        logs = {ranks: folder / f"{phase}-{ranks}.log" for ranks in worlds}
        launches = {log: launch_ranks(WORKER, ranks, log, phase, folder, address) for ranks, log in logs.items()}
        wait_for_all(launches, LAUNCH_TIMEOUT_S)
    return Found(folder)


def of_steps(arrays, first):
    return {name: array for name, array in arrays.items() if int(name.split("/")[0]) >= first}


slow = [pytest.mark.slow, pytest.mark.timeout(1000)]


def two_ranks(test):
    for mark in slow:
        test = mark(test)
    return test


@two_ranks
@every_case
def test_the_reference_becomes_the_policy_every_second_step_and_stays_it_until_the_next(found, case):
    arrays = found.arrays("save-2", case)
    is_exact = case in RESUMED
    for step in range(STEPS + 1):
        refreshed = step - step % EVERY
        reference_N, policy_N = arrays[f"{step}/reference"], arrays[f"{refreshed}/policy"]
        if is_exact:
            np.testing.assert_array_equal(reference_N, policy_N)
        else:
            assert 0 < np.abs(reference_N - policy_N).max() < 0.3
        if step != refreshed:
            np.testing.assert_array_equal(reference_N, arrays[f"{refreshed}/reference"])
            assert np.abs(policy_N - arrays[f"{step}/policy"]).max() > 1e-3


@two_ranks
@every_exact_case
def test_the_kl_is_0_right_after_a_refresh_and_only_then(found, case):
    values = found.values("save-2", case)
    kl = [values[str(step + 1)]["loss/kl"] for step in range(STEPS)]
    assert [step for step in range(STEPS) if kl[step] == 0.0] == [0, 2, 4]
    assert min(kl[step] for step in (1, 3, 5)) > 1e-5


@two_ranks
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_with_an_offloaded_reference_is_the_one_with_it_on_the_device_to_the_bit(found, stage):
    here, there = (found.arrays("save-2", f"zero{stage}-float32-{home}") for home in ("on_device", "offloaded"))
    assert here.keys() == there.keys()
    for name in here:
        np.testing.assert_array_equal(there[name], here[name], err_msg=name)


@two_ranks
@every_case
@pytest.mark.parametrize("step", SAVED)
def test_a_run_resumed_at_a_refresh_or_after_it_equals_the_undisturbed_one_to_the_bit(found, case, step):
    wanted, resumed = of_steps(found.arrays("save-2", case), step), found.arrays("load-2", f"{case}-from{step}")
    gradients = {name for name in wanted if name.startswith(f"{step}/weight")}
    assert wanted.keys() - gradients == resumed.keys()
    for name in resumed:
        np.testing.assert_array_equal(resumed[name], wanted[name], err_msg=name)
    straight, again = found.values("save-2", case), found.values("load-2", f"{case}-from{step}")
    for version in range(step + 1, STEPS + 1):
        assert again[str(version)] == straight[str(version)], version


@two_ranks
@every_exact_case
@pytest.mark.parametrize("step", SAVED)
def test_another_number_of_ranks_has_the_same_reference_to_the_bit(found, case, step):
    wanted, resumed = found.arrays("save-2", case), found.arrays("load-1", f"{case}-from{step}")
    np.testing.assert_array_equal(resumed[f"{step}/reference"], wanted[f"{step}/reference"])


@two_ranks
@every_case
def test_a_checkpoint_holds_its_reference_and_of_those_in_use_one_is_there(found, case):
    assert found.values("save-2", case)["folders"] == ["reference", "reference", "reference-000006"]
    checkpoints = found.folder / "checkpoints" / case
    parts = [checkpoints / f"step-00000{step}" / "reference" / "model.safetensors" for step in SAVED]
    assert os.path.samefile(*parts)
    marks = [json.loads((part.parent.parent / "complete.json").read_text()) for part in parts]
    assert all("reference/model.safetensors" in mark["files"] for mark in marks)
    assert not list(checkpoints.rglob("reference-*"))


@two_ranks
def test_without_a_kl_term_no_reference_is_loaded_and_none_refreshed(found):
    values = found.values("save-2", "unpenalised")
    assert values["refused"] == {"0.0": False, "0.1": True}
    assert values["folders"] == []
    assert values["6"]["loss/kl"] == 0.0


@two_ranks
def test_a_reference_that_cannot_be_written_is_reported_on_every_rank(found):
    messages = found.values("save-2", "unpenalised")["error"]
    assert len(messages) == 2
    for message in messages:
        assert "reference-000002 could not be written" in message
        assert "bytes are free" in message
