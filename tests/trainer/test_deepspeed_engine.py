"""The trainer on real DeepSpeed, over gloo, under a real mpirun: what no number of ranks, ZeRO stage or micro-batch
may change, and that a checkpoint goes on to the bit. deepspeed_worker.py runs it all, in one launch for each number of
ranks; the tests compare what it found."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from launches import launch_ranks, wait_for_all
from scored_groups import NAN, completion, score, scored_group
from tiny_models import sharded_llama
from towline.storage.records import FinishReason

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TEMPERATURE, BETA, CLIP, LEARNING_RATE, MAX_NORM = 0.7, 0.1, 0.2, 1e-3, 0.5
STAGES = (0, 1, 2, 3)
MICRO_BATCHES = {1: 4096, 2: 90, 4: 48}
WORKER = Path(__file__).parent / "deepspeed_worker.py"
LAUNCH_TIMEOUT_S = 500

# --- models and groups -------------------------------------------------------------------------------------------


def padded_logprobs(model, sequences):
    """The plain way: right padding, an attention mask, all logits; a list of [completion tokens]."""
    longest = max(len(prompt) + len(ids) for prompt, ids in sequences)
    ids_BT, mask_BT = torch.zeros(2, len(sequences), longest, dtype=torch.int64)
    for row, (prompt, ids) in enumerate(sequences):
        ids_BT[row, : len(prompt) + len(ids)] = torch.tensor([*prompt, *ids])
        mask_BT[row, : len(prompt) + len(ids)] = 1
    logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False).logits / TEMPERATURE
    logprobs_BTV = torch.log_softmax(logits_BTV, -1)
    return [
        logprobs_BTV[row, len(prompt) - 1 : len(prompt) + len(ids) - 1].gather(-1, torch.tensor(ids)[:, None])[:, 0]
        for row, (prompt, ids) in enumerate(sequences)
    ]


def random_groups(model, lengths, *, seed=0, noise=0.15, longest=None):
    """Old log-probs are the model's own with noise, so that some ratios are clipped.

    Args:
        longest: completions of as many tokens count as cut.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for row, (prompt_length, completion_lengths) in enumerate(lengths):
        prompt = rng.integers(0, 1600, prompt_length).tolist()
        token_ids = [rng.integers(0, 1600, length).tolist() for length in completion_lengths]
        with torch.no_grad():
            own = padded_logprobs(model, [(prompt, ids) for ids in token_ids])
        completions = [
            completion(
                ids,
                logprobs.numpy() + rng.normal(0, noise, len(ids)),
                finish_reason=FinishReason.LENGTH if len(ids) == longest else FinishReason.STOP,
            )
            for ids, logprobs in zip(token_ids, own, strict=True)
        ]
        groups.append(scored_group(prompt, completions, rng.random(len(completions)).round(1), row=row))
    return groups


LENGTHS = [(3, [9, 2, 17, 12]), (7, [2, 15, 4, 11]), (5, [8, 8, 8, 14]), (4, [17, 1, 6, 10])]
THREE = [(3, [9, 12, 7])]
"""No two of which fit into 16 tokens: the second of two ranks gets an empty micro-batch."""


def shuffled(groups):
    """The groups backwards, and their completions."""
    return [
        dataclasses.replace(
            scored,
            group=dataclasses.replace(scored.group, completions=scored.group.completions[::-1]),
            scores=scored.scores[::-1],
        )
        for scored in reversed(groups)
    ]


def with_a_broken_logprob(groups):
    broken = copy.deepcopy(groups)
    broken[1].group.completions[2].logprobs[1] = NAN
    return broken


def failed_groups(*, one_scored):
    details = ["", "ValueError: no gold answer"] + [""] * 2
    scores = [score(NAN, detail=detail) for detail in details]
    groups = [scored_group([1, 2], [completion([3, 4])] * 4, scores, row=row) for row in range(2)]
    if one_scored:
        aborted = completion([3], finish_reason=FinishReason.ABORTED)
        groups.append(scored_group([1, 2], [completion([3]), aborted, aborted], [0.5, 1.0, 0.0]))
    return groups


@pytest.fixture(scope="module")
def models():
    return {
        "tied": sharded_llama(0, tied=True),
        "untied": sharded_llama(1, tied=False),
        "other": sharded_llama(2, tied=True),
    }


@pytest.fixture(scope="module")
def groups(models):
    return {
        "tied": random_groups(models["tied"], LENGTHS),
        "untied": random_groups(models["untied"], LENGTHS),
        "three": random_groups(models["tied"], THREE),
        "cut": random_groups(models["tied"], LENGTHS, longest=17),
        "on-policy": random_groups(models["tied"], LENGTHS, noise=0.0),
        "shuffled": shuffled(random_groups(models["tied"], LENGTHS)),
        "nan": with_a_broken_logprob(random_groups(models["tied"], LENGTHS)),
        "all-cut": random_groups(models["tied"], [(3, [5, 5]), (4, [5, 5])], longest=5),
        "failed": failed_groups(one_scored=False),
        "single": failed_groups(one_scored=True),
    }


# --- the launch --------------------------------------------------------------------------------------------------


class Found:
    """What the worker left, by number of ranks and scenario."""

    def __init__(self, folder):
        self.folder = folder

    def values(self, scenario, ranks=2):
        return json.loads((self.folder / f"ranks-{ranks}" / f"{scenario}.json").read_text())

    def arrays(self, scenario, ranks=2):
        with np.load(self.folder / f"ranks-{ranks}" / f"{scenario}.npz") as stored:
            return dict(stored)


@pytest.fixture(scope="module")
def found(tmp_path_factory, models, groups):
    folder = tmp_path_factory.mktemp("deepspeed")
    for name, model in models.items():
        model.save_pretrained(folder / name)
    (folder / "groups.pkl").write_bytes(pickle.dumps(groups))
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = {ranks: folder / f"ranks-{ranks}.log" for ranks in (1, 2)}
    address = f"127.0.0.1:{store.port}"
    launches = {log: launch_ranks(WORKER, ranks, log, folder, address) for ranks, log in logs.items()}
    wait_for_all(launches, LAUNCH_TIMEOUT_S)
    return Found(folder)


# --- comparing ---------------------------------------------------------------------------------------------------


def largest_difference(found, wanted, kind):
    """Over all tensors of a kind, the largest difference relative to the largest number of that tensor."""
    names = [name for name in wanted if name.startswith(kind)]
    assert names
    assert sorted(name for name in found if name.startswith(kind)) == sorted(names)
    return max(np.abs(found[name] - wanted[name]).max() / np.abs(wanted[name]).max() for name in names)


def assert_same_step(found, wanted, relative=1e-5):
    """Of two (values, arrays): loss, KL, gradient norm, every gradient, and the weights after the step."""
    for name in ("loss/policy", "loss/kl", "loss/gradient_norm", "loss/entropy", "loss/clipped", "tokens/loss"):
        assert found[0][name] == pytest.approx(wanted[0][name], rel=relative), name
    assert largest_difference(found[1], wanted[1], "gradient") < relative
    # AdamW's first step is the sign of the gradient, also of one that is all rounding: at most two steps apart, rarely.
    for name in (name for name in wanted[1] if name.startswith("weight")):
        difference = np.abs(found[1][name] - wanted[1][name])
        assert difference.max() <= 2.1 * LEARNING_RATE, name
        assert (difference > 0.01 * LEARNING_RATE).mean() < 1e-3, name


def assert_same_bits(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def part(arrays, prefix):
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


# --- one gradient, however it is computed ------------------------------------------------------------------------


def clipped_surrogate(logprobs, old, advantage, low=CLIP, high=CLIP):
    ratio = torch.exp(logprobs - old)
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def k3(logprobs, other):
    return torch.exp(other - logprobs) - (other - logprobs) - 1


def grpo(logprobs, rollout, other, advantage):
    return clipped_surrogate(logprobs, rollout, advantage) + BETA * k3(logprobs, other)


def gspo(logprobs, rollout, other, advantage):
    """The completion's own mean, so that it weighs as much as another."""
    ratio = torch.exp((logprobs - rollout).mean())
    value = -torch.minimum(ratio * advantage, ratio.clamp(0.98, 1.04) * advantage)
    return (value + BETA * k3(logprobs, other)) / len(logprobs)


def cispo(logprobs, rollout, other, advantage):
    weight = torch.exp(logprobs - rollout).clamp(0.9, 1.1).detach()
    return -weight * advantage * logprobs + BETA * k3(logprobs, other)


def rloo(logprobs, rollout, other, advantage):
    return clipped_surrogate(logprobs, rollout, advantage)


def dapo(logprobs, rollout, other, advantage):
    return clipped_surrogate(logprobs, rollout, advantage, high=0.28)


def reinforce(logprobs, rollout, other, advantage):
    return -advantage * logprobs


def recomputed(logprobs, rollout, other, advantage):
    old = logprobs.detach()
    weight = torch.exp(old - rollout).clamp(max=1.1)
    return weight * clipped_surrogate(logprobs, old, advantage) + BETA * k3(logprobs, other)


def masked(logprobs, rollout, other, advantage):
    old = logprobs.detach()
    weight = torch.exp(old - rollout)
    weight = weight * ((weight >= 0.9) & (weight <= 1.2))
    return weight * clipped_surrogate(logprobs, old, advantage) + BETA * k3(logprobs, other)


def unbiased(logprobs, rollout, other, advantage):
    ratio = torch.exp(logprobs - rollout)
    return clipped_surrogate(logprobs, rollout, advantage) + BETA * ratio * k3(logprobs, other)


def group_relative(rewards):
    return [(group - group.mean()) / (group.std() + 1e-6) for group in rewards]


def leave_one_out(rewards):
    return [group - np.array([np.delete(group, i).mean() for i in range(len(group))]) for group in rewards]


def over_the_step(rewards):
    everything = np.concatenate(rewards)
    return [(group - everything.mean()) / (everything.std() + 1e-6) for group in rewards]


PLAIN = {
    "gspo": (group_relative, gspo),
    "cispo": (group_relative, cispo),
    "rloo": (leave_one_out, rloo),
    "reinforce++": (over_the_step, rloo),
    "recomputed": (group_relative, recomputed),
    "masked": (group_relative, masked),
    "unbiased": (group_relative, unbiased),
}
"""Each member as a person would write it: advantages of all groups, and the loss of a completion's tokens."""


def padded_step(model, reference, groups, member=(group_relative, grpo), *, kl_in_reward=False, masks_cut=False):
    """The same training step in a few lines of torch: padded, one process, no DeepSpeed."""
    compare, token_loss = member
    model.requires_grad_(True)
    model.zero_grad()
    everything, rewards = [], []
    for scored in groups:
        sequences = [(scored.group.prompt_token_ids, item.token_ids.tolist()) for item in scored.group.completions]
        with torch.no_grad():
            references = padded_logprobs(reference, sequences)
        rollouts = [torch.from_numpy(item.logprobs) for item in scored.group.completions]
        everything.append(list(zip(padded_logprobs(model, sequences), rollouts, references, strict=True)))
        taken = [(old - other).sum().item() if kl_in_reward else 0.0 for _, old, other in everything[-1]]
        rewards.append(np.array([item.total for item in scored.scores]) - BETA * np.array(taken))
    total, kl, num_tokens, num_completions = 0.0, 0.0, 0, 0
    for scored, of_group, advantages in zip(groups, everything, compare(rewards), strict=True):
        for item, (logprobs, rollout, other), advantage in zip(
            scored.group.completions, of_group, advantages, strict=True
        ):
            if masks_cut and item.finish_reason is FinishReason.LENGTH:
                continue
            total = total + token_loss(logprobs, rollout, other, advantage).sum()
            kl += k3(logprobs, other).sum().item()
            num_tokens += len(logprobs)
            num_completions += 1
    loss = total / (num_completions if token_loss is gspo else num_tokens)
    loss.backward()
    gradients = {f"gradient/{name}": weight.grad.numpy().copy() for name, weight in model.named_parameters()}
    norm = np.sqrt(sum((gradient.astype(np.float64) ** 2).sum() for gradient in gradients.values()))
    return {"loss": loss.item(), "kl": kl / num_tokens, "norm": norm, "tokens": num_tokens}, gradients


@pytest.fixture(scope="module")
def padded(models, groups):
    return {model: padded_step(models[model], models["other"], groups[model]) for model in ("tied", "untied")}


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_packed_and_sharded_training_equals_plain_padded_training(found, padded, model, ranks, stage):
    wanted, gradients = padded[model]
    values, arrays = found.values(f"{model}-zero{stage}", ranks), found.arrays(f"{model}-zero{stage}", ranks)
    assert values["loss/policy"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert values["loss/kl"] == pytest.approx(wanted["kl"], rel=1e-5)
    assert values["loss/gradient_norm"] == pytest.approx(wanted["norm"], rel=1e-5)
    assert values["tokens/loss"] == wanted["tokens"]
    assert largest_difference(arrays, gradients, "gradient") < 1e-5
    assert 0 < values["loss/clipped"] < 0.5
    assert wanted["norm"] > MAX_NORM


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_equals_two(found, model, stage):
    name = f"{model}-zero{stage}"
    assert_same_step((found.values(name), found.arrays(name)), (found.values(name, 1), found.arrays(name, 1)))


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("stage", STAGES[1:])
def test_every_zero_stage_equals_none(found, model, stage):
    name, plain = f"{model}-zero{stage}", f"{model}-zero0"
    assert_same_step((found.values(name), found.arrays(name)), (found.values(plain), found.arrays(plain)))


@pytest.mark.parametrize("stage", STAGES)
def test_several_micro_batches_equal_one(found, stage):
    micro, one = found.values(f"micro-zero{stage}"), found.values(f"tied-zero{stage}")
    assert micro["tokens/fill"] > 10 * one["tokens/fill"]
    assert_same_step(
        (micro, found.arrays(f"micro-zero{stage}")), (one, found.arrays(f"tied-zero{stage}")),
    )  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_buckets_equal_packed_micro_batches(found, stage):
    buckets, packed = found.values(f"buckets-zero{stage}"), found.values(f"tied-zero{stage}")
    # A prompt for each completion.
    assert buckets["tokens/trained"] == sum(len(lengths) * prompt + sum(lengths) for prompt, lengths in LENGTHS)
    assert packed["tokens/trained"] < buckets["tokens/trained"]
    one_batch = sum(len(lengths) for _, lengths in LENGTHS) * max(prompt + max(lengths) for prompt, lengths in LENGTHS)
    assert packed["tokens/padding_saved"] == pytest.approx(1 - packed["tokens/trained"] / one_batch)
    assert_same_step(
        (buckets, found.arrays(f"buckets-zero{stage}")), (packed, found.arrays(f"tied-zero{stage}")),
    )  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_with_an_empty_micro_batch_changes_nothing(found, stage):
    name = f"three-zero{stage}"
    two, one = found.values(name), found.values(name, 1)
    # 3 sequences, 37 tokens: in 3 micro-batches of 16 tokens, or in 4 of which one is empty
    assert (one["tokens/fill"], two["tokens/fill"]) == (pytest.approx(37 / 48), pytest.approx(37 / 64))
    assert_same_step((two, found.arrays(name)), (one, found.arrays(name, 1)))


@pytest.mark.parametrize("member", PLAIN)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_member_of_the_family_is_what_a_few_plain_lines_compute(found, models, groups, member, ranks):
    wanted, gradients = padded_step(
        models["tied"], models["other"], groups["tied"], PLAIN[member], kl_in_reward=member == "reinforce++"
    )
    values, arrays = found.values(f"{member}-zero2", ranks), found.arrays(f"{member}-zero2", ranks)
    assert values["loss/policy"] == pytest.approx(wanted["loss"], rel=1e-5, abs=1e-7)
    assert values["loss/gradient_norm"] == pytest.approx(wanted["norm"], rel=1e-5)
    assert largest_difference(arrays, gradients, "gradient") < 1e-5


@pytest.mark.parametrize("ranks", [1, 2])
def test_completions_that_were_cut_are_compared_with_and_are_in_neither_part_of_the_loss(found, models, groups, ranks):
    # G3-08
    wanted, gradients = padded_step(
        models["tied"], models["other"], groups["cut"], (group_relative, dapo), masks_cut=True
    )  # fmt: skip
    values, arrays = found.values("cut-zero2", ranks), found.arrays("cut-zero2", ranks)
    # two completions of 17 tokens
    assert values["tokens/loss"] == wanted["tokens"] == found.values("tied-zero2")["tokens/loss"] - 34
    assert values["loss/policy"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert largest_difference(arrays, gradients, "gradient") < 1e-5


def test_on_policy_grpo_has_the_gradient_of_reinforce_with_the_groups_baseline(found, models, groups):
    _, gradients = padded_step(models["tied"], models["other"], groups["on-policy"], (group_relative, reinforce))
    assert found.values("on-policy-rollout")["loss/clipped"] == 0
    assert largest_difference(found.arrays("on-policy-rollout"), gradients, "gradient") < 1e-5


def test_recomputed_logprobs_that_are_the_engines_give_what_the_engines_give(found):
    names = ("on-policy-recomputed", "on-policy-rollout")
    assert_same_step(*((found.values(name), found.arrays(name)) for name in names))


def test_dapo_with_equal_clips_and_nothing_cut_is_grpo(found):
    assert found.values("equal-clips-zero2")["loss/clipped"] > 0
    assert_same_bits(found.arrays("equal-clips-zero2"), found.arrays("tied-zero2"))


def test_the_order_of_groups_and_of_their_completions_changes_nothing(found):
    name, usual = "shuffled-zero2", "tied-zero2"
    assert_same_step((found.values(name), found.arrays(name)), (found.values(usual), found.arrays(usual)))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_no_number_of_accumulated_micro_batches_changes_anything(found, number, ranks):
    name, usual = f"accumulation-{number}", "tied-zero2"
    values = found.values(name, ranks)
    rows = values["tokens/trained"] / (values["tokens/fill"] * MICRO_BATCHES[number])
    assert rows == pytest.approx(number if ranks == 1 else max(2, number))
    assert_same_step((values, found.arrays(name, ranks)), (found.values(usual), found.arrays(usual)))


def test_what_the_corrections_do_is_measured(found, models, groups):
    with torch.no_grad():
        weights = torch.cat([
            torch.exp(own - torch.from_numpy(item.logprobs))
            for scored in groups["tied"]
            for item, own in zip(
                scored.group.completions,
                padded_logprobs(
                    models["tied"],
                    [(scored.group.prompt_token_ids, item.token_ids.tolist()) for item in scored.group.completions],
                ),
                strict=True,
            )
        ])  # fmt: skip
    truncated, masked = found.values("recomputed-zero2"), found.values("masked-zero2")
    assert truncated["mismatch/weight"] == pytest.approx(weights.clamp(max=1.1).mean().item(), rel=1e-5)
    assert truncated["mismatch/weight_bounded"] == pytest.approx((weights >= 1.1).float().mean().item())
    inside = (weights >= 0.9) & (weights <= 1.2)
    assert masked["mismatch/weight"] == pytest.approx((weights * inside).mean().item(), rel=1e-5)
    assert masked["mismatch/weight_bounded"] == pytest.approx((~inside).float().mean().item())


@pytest.mark.parametrize("member", PLAIN)
@pytest.mark.parametrize("other", ["zero3", "micro"])
def test_no_member_depends_on_sharding_or_micro_batches(found, member, other):
    same = [(found.values(name), found.arrays(name)) for name in (f"{member}-{other}", f"{member}-zero2")]
    for name in ("loss/policy", "loss/gradient_norm", "loss/entropy"):
        assert same[0][0].get(name) == pytest.approx(same[1][0].get(name), rel=1e-5, abs=1e-7), name
    assert largest_difference(same[0][1], same[1][1], "gradient") < 1e-5


@pytest.mark.parametrize("normaliser", ["sequence", "constant"])
def test_the_other_normalisers_do_not_depend_on_the_ranks(found, normaliser):
    name = f"{normaliser}-zero2"
    assert found.values(name)["loss/policy"] != pytest.approx(found.values("tied-zero2")["loss/policy"], rel=1e-3)
    assert_same_step((found.values(name), found.arrays(name)), (found.values(name, 1), found.arrays(name, 1)))


@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_checkpointing_changes_nothing(found, stage):
    name, plain = f"checkpointing-zero{stage}", f"tied-zero{stage}"
    assert_same_step((found.values(name), found.arrays(name)), (found.values(plain), found.arrays(plain)))


MEASURED = (
    "loss/policy", "loss/kl", "loss/clipped", "loss/clipped_first", "loss/entropy", "loss/gradient_norm",
    "mismatch/k3", "mismatch/max_abs_logprob", "tokens/loss",
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "relative", "of_gradient"),
    # Two roundings to bfloat16 were seen where the processor multiplies in it.
    [("tied", 1e-6, 1e-6), ("untied", 1e-6, 1e-6), ("bfloat16", 1e-3, 4 * 2**-8)],
)
@pytest.mark.parametrize("stage", STAGES)
def test_one_pass_over_the_logits_is_two_passes(found, name, relative, of_gradient, stage):
    one, two = f"{name}-zero{stage}", f"two-passes-{name}-zero{stage}"
    for measured in MEASURED:
        assert found.values(one)[measured] == pytest.approx(found.values(two)[measured], rel=relative), measured
    assert found.values(one)["loss/clipped"] > 0
    assert largest_difference(found.arrays(one), found.arrays(two), "gradient") < of_gradient


# --- the reference -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_a_policy_at_its_reference_has_no_kl_and_the_gradient_of_the_rewards_alone(found, stage):
    name, unpenalised = f"at-reference-zero{stage}", f"unpenalised-zero{stage}"
    assert found.values(name)["loss/kl"] == 0.0
    assert found.values(name)["loss/policy"] == found.values(unpenalised)["loss/policy"]
    assert largest_difference(found.arrays(name), found.arrays(unpenalised), "gradient") < 1e-6
    assert found.values(f"tied-zero{stage}")["loss/kl"] > 0.1


@pytest.mark.parametrize("stage", [2, 3])
def test_the_reference_is_asked_once_for_each_micro_batch(found, stage):
    values = found.values(f"epochs-zero{stage}")
    assert values["asked"] >= 4
    assert values["asked_twice"] == 0
    assert values["reference_error"] < 1e-5


@pytest.mark.parametrize("stage", [2, 3])
def test_a_second_inner_epoch_without_learning_repeats_the_first(found, stage):
    values = found.values(f"epochs-zero{stage}")
    for name in ("loss/policy", "loss/kl", "loss/gradient_norm", "tokens/loss", "tokens/trained"):
        assert values["still"][name] == pytest.approx(values["once"][name], rel=1e-6), name


@pytest.mark.parametrize("stage", [2, 3])
def test_inner_steps_build_on_one_another(found, stage):
    values, one = found.values(f"epochs-zero{stage}"), found.values(f"tied-zero{stage}")
    assert np.isfinite([values["moving"][name] for name in values["moving"] if name.startswith("loss/")]).all()
    assert values["moving"]["loss/policy"] != pytest.approx(values["still"]["loss/policy"], rel=1e-2)
    # four steps of AdamW move further than one
    assert one["moved"] < values["moving"]["moved"] < 4.4 * LEARNING_RATE
    assert values["moving"]["tokens/loss"] == one["tokens/loss"] / 2


# --- weights -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["loaded", "trained"])
@pytest.mark.parametrize("name", ["perturbed-zero0", "perturbed-zero2", "perturbed-zero3", "perturbed-bfloat16-zero3"])
def test_perturbed_weights_are_used_inside_and_come_back_to_the_bit(found, name, moment):
    arrays = part(found.arrays(name), f"{moment}/")
    before, inside, after = (part(arrays, f"{when}/") for when in ("before", "inside", "after"))
    assert_same_bits(after, before)
    np.testing.assert_array_equal(inside["again"], inside["logprobs"])
    assert np.abs(inside["logprobs"] - before["logprobs"]).max() > 0.05
    for weight in part(before, "weight/"):
        noise = inside[f"weight/{weight}"] - before[f"weight/{weight}"]
        spread = max(before[f"weight/{weight}"].std(), 1e-3)
        # of 64 numbers at least, rounded to bfloat16 at worst
        assert noise.std() == pytest.approx(0.05 * spread, rel=0.35) or "bfloat16" in name, weight
        assert noise.any() or "norm" in weight, weight


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_perturbation_leaves_no_trace_in_the_training_after_it(found, stage):
    values = found.values(f"perturbed-zero{stage}")
    assert values["loss/policy"] == pytest.approx(found.values("perturbed-zero0")["loss/policy"], rel=1e-4)


@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gathered_weights_are_those_of_the_model_folder(found, models, model, stage):
    # case G6-08: of full shape, under ZeRO-3 too, where a rank holds shards
    name = f"tensors-{model}-zero{stage}"
    state = {f"weight/{key}": value.detach().numpy() for key, value in models[model].named_parameters()}
    assert_same_bits(found.arrays(name), state)
    assert found.values(name)["metas"] == [
        [key.removeprefix("weight/"), "float32", list(value.shape)] for key, value in state.items()
    ]
    assert ("weight/lm_head.weight" in state) == (model == "untied")


@pytest.mark.parametrize("name", ["tied-zero0", "tied-zero3", "bfloat16-zero0", "bfloat16-zero3"])
def test_the_first_step_of_adamw_moves_weights_by_the_learning_rate(found, name):
    moved = found.values(name)["moved"]
    rounding = 2**-8 if name.startswith("bfloat16") else 1e-6
    assert 0.9 * LEARNING_RATE < moved < 1.01 * LEARNING_RATE + rounding


@pytest.mark.parametrize("stage", STAGES)
def test_the_first_of_four_warm_up_steps_moves_weights_by_a_quarter_of_it(found, stage):
    values = found.values(f"warmup-zero{stage}")
    assert values["loss/learning_rate"] == LEARNING_RATE / 4
    assert 0.9 * LEARNING_RATE / 4 < values["moved"] < 1.01 * LEARNING_RATE / 4


@pytest.mark.parametrize("stage", [2, 3])
def test_a_learning_rate_of_0_moves_nothing(found, stage):
    assert found.values(f"still-zero{stage}")["moved"] == 0.0
    assert found.values(f"still-zero{stage}")["loss/gradient_norm"] > MAX_NORM


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_trains_on_nearly_the_same_loss(found, stage):
    half, full = found.values(f"bfloat16-zero{stage}"), found.values(f"tied-zero{stage}")
    assert half["loss/policy"] == pytest.approx(full["loss/policy"], rel=2e-2, abs=2e-2)
    assert half["loss/gradient_norm"] == pytest.approx(full["loss/gradient_norm"], rel=5e-2)


# --- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_loaded_checkpoint_goes_on_to_the_bit(found, stage, precision):
    name = f"resumed-{precision}-zero{stage}"
    values, arrays = found.values(name), found.arrays(name)
    assert values["client_state"] == 1
    assert_same_bits(part(arrays, "loaded/"), part(arrays, "saved/"))
    for step in (1, 2):
        straight, resumed = values[f"straight/{step}"], values[f"resumed/{step}"]
        assert {key: straight[key] for key in straight if key.startswith(("loss/", "tokens/"))} == {
            key: resumed[key] for key in resumed if key.startswith(("loss/", "tokens/"))
        }
        assert_same_bits(part(arrays, f"resumed/{step}/"), part(arrays, f"straight/{step}/"))
    assert largest_difference(part(arrays, "straight/2/"), part(arrays, "straight/1/"), "weight") > 1e-4


# --- checks of its own machinery -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_the_checks_of_a_start_find_nothing_and_leave_no_trace(found, stage, precision, ranks):
    name = f"checked-{precision}-zero{stage}"
    values, arrays = found.values(name, ranks), found.arrays(name, ranks)
    start = values["checked/0"]
    assert start["check/still_logprob"] == 0.0
    assert 0 < start["check/split_logprob"] < (1e-5 if precision == "float32" else 1e-2)
    assert 0 < start["check/split_loss"] < (1e-5 if precision == "float32" else 1e-2)
    for step in ("0", "1"):
        checked, plain = values[f"checked/{step}"], values[f"plain/{step}"]
        for name in plain.keys() - {"memory/trainer_gib"}:
            np.testing.assert_equal(checked[name], plain[name], err_msg=name)
        assert checked["check/fixed_gradient"] == checked["check/fixed_graphs"] == 0.0
        assert 0 < checked["check/kl_effect"] < 1
    assert_same_bits(part(arrays, "checked/"), part(arrays, "plain/"))
    assert any(array.any() for array in part(arrays, "plain/state/").values())


@pytest.mark.parametrize("fault", ["decay", "dropout", "buffer"])
def test_a_step_with_learning_rate_0_tells_what_changes_without_it(found, fault):
    assert found.values(f"planted-{fault}", ranks=1)["check/still_logprob"] > 1e-3


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_is_not_finite_ends_every_rank_at_its_own_step(found, stage, precision):
    said = found.values(f"not-finite-{precision}-zero{stage}")["said"]
    assert said[0] == said[1]
    assert said[0].startswith("step 7: loss ")
    assert "gradient norm nan" in said[0] or "gradient norm inf" in said[0]
    assert "towline replay --step 7" in said[0]


# --- nothing to learn from ---------------------------------------------------------------------------------------


def test_a_step_whose_grader_always_failed_is_refused(found):
    values = found.values("failed")
    assert (
        "RewardError: step 7: no prompt has two scored completions to compare: of 8 completions 8 could not be scored"
        in (values["error"])
    )
    assert "ValueError: no gold answer" in values["error"]
    assert values["moved"] == 0.0


def test_a_step_with_single_scored_completions_is_refused(found):
    values = found.values("single")
    assert "of 11 completions 8 could not be scored and 2 were taken back" in values["error"]
    assert values["moved"] == 0.0


def test_a_step_of_which_everything_was_cut_is_refused_for_that_reason(found):
    # G3-08: no division by 0 tokens
    values = found.values("all-cut")
    said = "RewardError: step 7: nothing to train on: the 4 completions that can be compared were all cut"
    assert said in values["error"]
    assert "trainer.masks_truncated" in values["error"]
    assert values["moved"] == 0.0


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("in the ratio", "step 7: loss nan"),
        ("in the correction", "step 7: loss nan"),
        ("in the reward", "the KL of 1 of 16 completions to the reference is not finite"),
    ],
)
def test_a_logprob_that_is_not_a_number_ends_the_step_on_every_rank(found, place, said):
    # G3-18
    assert f"NumericsError: {said}" in found.values(f"nan-{place}")["error"]
