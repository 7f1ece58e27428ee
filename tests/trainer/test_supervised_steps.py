"""One optimiser step of SFT, DPO and reward models on real DeepSpeed, over gloo, under a real mpirun, beside the same
step in a few lines of torch. supervised_worker.py runs every scenario on one rank and on two."""

import json
import math
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, models
from torch.nn.functional import logsigmoid
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast

from launches import launch_ranks, wait_for_all
from tiny_models import sharded_llama, small_llama
from towline.trainer.packing import TokenSequence
from towline.trainer.token_examples import TokenExample, TokenPair

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORKER = Path(__file__).parent / "supervised_worker.py"
PEAK, DECAY, MAX_NORM, BETA, CENTRING = 1e-3, 0.1, 0.5, 0.3, 0.02
RATE = PEAK * (1 + math.cos(math.pi / 8)) / 2
"""Cosine, in step 3 of 10 after 2 of warm-up: an eighth of the way down."""
OBJECTIVES, STAGES = ("sft", "dpo", "reward"), (0, 2, 3)
SIZES = [(3, 9, 4), (5, 2, 7), (2, 1, 6), (4, 8, 8), (1, 5, 3)]
"""Tokens of prompt, chosen and rejected completion; the chosen one is imitated in SFT."""
MARGINS = [0.5, None, 1.5, 0.0, 2.0]
ALL = tuple(range(len(SIZES)))

every_objective = pytest.mark.parametrize("objective", OBJECTIVES)
every_stage = pytest.mark.parametrize("stage", STAGES)
one_and_two = pytest.mark.parametrize("ranks", [1, 2])

# --- examples and models -----------------------------------------------------------------------------------------


def pairs():
    rng = np.random.default_rng(0)
    made = []
    for (num_prompt_tokens, *lengths), margin in zip(SIZES, MARGINS, strict=True):
        prompt = rng.integers(3, 1600, num_prompt_tokens)
        chosen, rejected = (
            TokenSequence(
                token_ids=np.concatenate([prompt, rng.integers(3, 1600, length)]), num_prompt_tokens=num_prompt_tokens
            )
            for length in lengths
        )
        made.append(TokenPair(row=len(made), margin=margin, chosen=chosen, rejected=rejected))
    return made


def demonstrations():
    """Two of them have a later turn of the user in their middle, which is read and not learnt."""
    made = []
    for pair in pairs():
        trained = np.ones(len(pair.chosen.token_ids) - pair.chosen.num_prompt_tokens, dtype=np.bool_)
        if len(trained) > 5:
            trained[2:5] = False
        made.append(TokenExample(row=pair.row, tokens=pair.chosen, trained=trained))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("supervised")
    policy = sharded_llama(0)
    policy.save_pretrained(folder / "policy")
    small_llama(vocab_size=1600, hidden_size=32).save_pretrained(folder / "small")
    torch.manual_seed(1)
    policy.config.num_labels = 1
    policy.config.pad_token_id = 0
    LlamaForSequenceClassification(policy.config).save_pretrained(folder / "reward")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(1600)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(folder / "reward")
    examples = {"demonstrations": demonstrations(), "pairs": pairs(), "reference": reference()}
    (folder / "examples.pkl").write_bytes(pickle.dumps(examples))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for ranks in (1, 2):
        log = folder / f"{ranks}.log"
        wait_for_all({log: launch_ranks(WORKER, ranks, log, folder, f"127.0.0.1:{store.port}")}, 200)
    return folder


def found(folder, name, ranks=2):
    """Metrics, and arrays."""
    values = json.loads((folder / f"ranks-{ranks}" / f"{name}.json").read_text())
    with np.load(folder / f"ranks-{ranks}" / f"{name}.npz") as stored:
        return values, dict(stored)


# --- the same step in plain torch --------------------------------------------------------------------------------


def rows_of(sequences):
    """Right padding, an attention mask."""
    longest = max(len(sequence.token_ids) for sequence in sequences)
    ids_BT, mask_BT = torch.zeros(2, len(sequences), longest, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        ids_BT[row, : len(sequence.token_ids)] = torch.from_numpy(sequence.token_ids)
        mask_BT[row, : len(sequence.token_ids)] = 1
    return {"input_ids": ids_BT, "attention_mask": mask_BT, "use_cache": False}


def logprobs_of(model, sequences):
    """Of the completion tokens of each sequence; beside them those of the whole vocabulary in their place."""
    logprobs_BTV = torch.log_softmax(model(**rows_of(sequences)).logits, -1)
    found = []
    for row, sequence in enumerate(sequences):
        logprobs_CV = logprobs_BTV[row, sequence.num_prompt_tokens - 1 : len(sequence.token_ids) - 1]
        targets_C1 = torch.from_numpy(sequence.token_ids[sequence.num_prompt_tokens :, None])
        found.append((logprobs_CV.gather(-1, targets_C1)[:, 0], logprobs_CV))
    return found


@cache
def reference():
    """Of each pair, by another model: [pairs, 2]."""
    model = sharded_llama(2)
    with torch.no_grad():
        both = [logprobs_of(model, [pair.chosen, pair.rejected]) for pair in pairs()]
    return np.array([[own_C.double().sum().item() for own_C, _ in completions] for completions in both])


def sft(model, rows, smoothing=0.0):
    examples = [demonstrations()[row] for row in rows]
    loss, number = 0.0, 0
    for example, (own_C, every_CV) in zip(
        examples, logprobs_of(model, [example.tokens for example in examples]), strict=True
    ):
        is_trained_C = torch.from_numpy(example.trained)
        losses_C = -(1 - smoothing) * own_C - smoothing * every_CV.mean(-1)
        loss, number = loss + losses_C[is_trained_C].sum(), number + int(is_trained_C.sum())
    return loss / number


def dpo(model, rows, kind="sigmoid", smoothing=0.0, is_per_token=False):
    losses = []
    table = torch.from_numpy(reference())
    for row in rows:
        pair = pairs()[row]
        (chosen_C, _), (rejected_C, _) = logprobs_of(model, [pair.chosen, pair.rejected])
        chosen = chosen_C.double().sum() - table[row, 0]
        rejected = rejected_C.double().sum() - table[row, 1]
        if is_per_token:
            chosen, rejected = chosen / len(chosen_C), rejected / len(rejected_C)
        delta = chosen - rejected
        if kind == "ipo":
            losses.append((delta - 1 / (2 * BETA)) ** 2)
        else:
            losses.append(-(1 - smoothing) * logsigmoid(BETA * delta) - smoothing * logsigmoid(-BETA * delta))
    return sum(losses) / len(losses)


def reward(model, rows):
    losses = []
    for row in rows:
        pair = pairs()[row]
        chosen, rejected = model(**rows_of([pair.chosen, pair.rejected])).logits[:, 0]
        losses.append(-logsigmoid(chosen - rejected - (pair.margin or 0.0)) + CENTRING * (chosen + rejected) ** 2)
    return sum(losses) / len(losses)


VARIANTS = {
    "sft": sft,
    "dpo": dpo,
    "reward": reward,
    "sft-smoothed": lambda model, rows: sft(model, rows, smoothing=0.1),
    "dpo-ipo": lambda model, rows: dpo(model, rows, kind="ipo", is_per_token=True),
    "dpo-smoothed": lambda model, rows: dpo(model, rows, smoothing=0.2),
    "dpo-per-token": lambda model, rows: dpo(model, rows, is_per_token=True),
}


@pytest.fixture(scope="module")
def plain(folder):
    """The step of a variant on some rows: loss, gradient norm, and arrays as the worker's."""
    known = {}

    def step(variant, rows=ALL):
        if (variant, rows) not in known:
            is_reward = variant == "reward"
            model = LlamaForSequenceClassification.from_pretrained(folder / "reward") if is_reward else sharded_llama(0)
            loss = VARIANTS[variant](model, rows)
            loss.backward()
            arrays = {f"gradient/{name}": weight.grad.numpy().copy() for name, weight in model.named_parameters()}
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item()
            torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=DECAY).step()
            arrays |= {f"weight/{name}": weight.detach().numpy().copy() for name, weight in model.named_parameters()}
            known[variant, rows] = (loss.item(), norm, arrays)
        return known[variant, rows]

    return step


def assert_same_step(step, wanted):
    (values, arrays), (loss, norm, plain_arrays) = step, wanted
    assert values["loss/nll" if "loss/nll" in values else "loss/preference"] == pytest.approx(loss, rel=1e-5)
    assert values["loss/gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert arrays.keys() == plain_arrays.keys()
    for name, expected in plain_arrays.items():
        difference = np.abs(arrays[name] - expected)
        if name.startswith("gradient"):
            assert difference.max() < 1e-5 * np.abs(expected).max(), name
        else:
            # AdamW's first step is the sign of the gradient, also of one that is all rounding.
            assert difference.max() <= 2.1 * RATE, name
            assert (difference > 0.01 * RATE).mean() < 1e-3, name


# --- the tests ---------------------------------------------------------------------------------------------------


@every_objective
@every_stage
@one_and_two
def test_a_step_in_micro_batches_is_that_of_plain_torch(folder, plain, objective, stage, ranks):
    assert_same_step(found(folder, f"{objective}-zero{stage}", ranks), plain(objective))


@every_objective
@pytest.mark.parametrize("packing", ["packed", "buckets"])
@pytest.mark.parametrize("max_tokens", [16, 4096])
@one_and_two
def test_neither_packing_nor_accumulation_changes_a_step(folder, plain, objective, packing, max_tokens, ranks):
    step = found(folder, f"{objective}-{packing}-{max_tokens}", ranks)
    assert_same_step(step, plain(objective))
    if max_tokens == 16:
        assert step[0]["micro_batches"] > 1
    elif packing == "packed":
        assert step[0]["micro_batches"] == 1


@pytest.mark.parametrize("variant", ["sft-smoothed", "dpo-ipo", "dpo-smoothed", "dpo-per-token"])
@one_and_two
def test_every_variant_is_that_of_plain_torch(folder, plain, variant, ranks):
    assert_same_step(found(folder, variant, ranks), plain(variant))


@every_objective
@every_stage
@one_and_two
def test_a_rank_without_an_example_changes_nothing(folder, plain, objective, stage, ranks):
    """G3-12: one example for two ranks."""
    assert_same_step(found(folder, f"{objective}-single-zero{stage}", ranks), plain(objective, (1,)))


@every_objective
@one_and_two
def test_bfloat16_is_close(folder, plain, objective, ranks):
    values, _ = found(folder, f"{objective}-bfloat16", ranks)
    loss, norm, _ = plain(objective)
    assert values["loss/nll" if objective == "sft" else "loss/preference"] == pytest.approx(loss, rel=0.03)
    assert values["loss/gradient_norm"] == pytest.approx(norm, rel=0.05)


@one_and_two
def test_only_what_is_learnt_is_counted(folder, ranks):
    trained = sum(int(example.trained.sum()) for example in demonstrations())
    assert trained == sum(size[1] for size in SIZES) - 2 * 3
    assert found(folder, "sft-zero2", ranks)[0]["tokens/loss"] == trained
    completions = sum(chosen + rejected for _, chosen, rejected in SIZES)
    for objective in ("dpo", "reward"):
        assert found(folder, f"{objective}-zero2", ranks)[0]["tokens/loss"] == completions


@every_objective
@one_and_two
def test_the_learning_rate_is_that_of_the_schedule_at_the_steps_number(folder, objective, ranks):
    assert found(folder, f"{objective}-zero2", ranks)[0]["loss/learning_rate"] == pytest.approx(RATE, rel=1e-12)


@pytest.mark.parametrize("variant", ["dpo", "dpo-smoothed"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@one_and_two
def test_dpo_begins_at_ln_2_with_a_margin_of_0(folder, variant, precision, ranks):
    """G3-30: the reference was computed by the same weights, in other micro-batches."""
    values, _ = found(folder, f"{variant}-at-reference-{precision}", ranks)
    assert values["loss/preference"] == pytest.approx(math.log(2), abs=1e-4)
    assert values["preference/margin"] == pytest.approx(0, abs=1e-4)
    assert values["loss/gradient_norm"] > 0.1


@one_and_two
def test_an_identical_pair_teaches_nothing(folder, ranks):
    """G3-32: but for rounding, since the second of two completions reads the prompt in another place."""
    values, _ = found(folder, "dpo-identical", ranks)
    assert values["loss/preference"] == pytest.approx(math.log(2), abs=1e-6)
    usual = found(folder, "dpo-zero2", ranks)[0]["loss/gradient_norm"]
    assert values["loss/gradient_norm"] < 1e-5 * usual


@every_objective
@every_stage
@one_and_two
def test_a_weight_that_is_no_number_ends_every_rank(folder, objective, stage, ranks):
    said = found(folder, f"{objective}-nan-zero{stage}", ranks)[0]["said"]
    assert len(said) == ranks
    assert len(set(said)) == 1
    assert said[0].startswith("step 3: loss nan, gradient norm ")
    assert "expected finite numbers" in said[0]
    assert "replay" not in said[0], "there is no ledger to replay"


@every_objective
@one_and_two
def test_a_model_whose_head_zero_3_keeps_whole_goes_on_after_a_checkpoint(folder, objective, ranks):
    """A head of fewer than 100,000 weights, as that of every reward model, is whole after a load and a shard after it
    was read: DeepSpeed saw a weight that it did not know, and ended the run with a "tracing error"."""
    straight, taken_up = found(folder, f"{objective}-taken-up", ranks)[0]["norms"]
    assert straight == taken_up
    assert straight[0] != straight[1]
