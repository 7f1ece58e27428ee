"""Losses and gradients beside those of TRL's trainers for SFT, DPO and reward models, on one model and one batch.

TRL is given right-padded rows, as its own collators make them; Towline one packed row, with prompts that pairs share.

Where TRL has no like option: its DPOTrainer smooths labels for "robust" and "aot" and leaves plain "sigmoid" as it is.
"aot" sorts the pairs of a batch by their log-ratios first; of a single pair it is the conservative loss.
"""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from towline.trainer.fused_loss import differentiated
from towline.trainer.normaliser import loss_totals, token_weights
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.packing_pairs import lay_out_pairs
from towline.trainer.policy import load_policy
from towline.trainer.preference_losses import completion_logprobs, preference_loss
from towline.trainer.reward_losses import pair_reward_loss
from towline.trainer.sequence_head import load_reward_model
from towline.trainer.token_examples import TokenPair

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

VOCABULARY, BETA = 97, 0.3
SIZES = [(3, 9, 4), (5, 2, 7), (2, 1, 6)]
"""Tokens of prompt, chosen and rejected completion."""
OPTIONS = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.1,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
USUAL = {
    "use_cpu": True, "report_to": [], "bf16": False, "per_device_train_batch_size": len(SIZES), "disable_tqdm": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, a reference and a reward model."""
    made = {}
    for seed, (name, kind) in enumerate(
        [("policy", LlamaForCausalLM), ("reference", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)]
    ):
        torch.manual_seed(seed)
        made[name] = tmp_path_factory.mktemp(name)
        extra = {"num_labels": 1} if name == "reward" else {}
        kind(LlamaConfig(**OPTIONS, **extra)).save_pretrained(made[name])
        words = {str(number): number for number in range(VOCABULARY)}
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
        ).save_pretrained(made[name])
    return made


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(0)
    made = []
    for num_prompt_tokens, *lengths in SIZES:
        prompt = rng.integers(2, VOCABULARY, num_prompt_tokens)
        chosen, rejected = (
            TokenSequence(
                token_ids=np.concatenate([prompt, rng.integers(2, VOCABULARY, length)]),
                num_prompt_tokens=num_prompt_tokens,
            )
            for length in lengths
        )
        made.append(TokenPair(row=0, margin=None, chosen=chosen, rejected=rejected))
    return made


def trainer_of(trainer_class, config_class, model, dataset, folder, settings, **arguments):
    from datasets import Dataset

    trainer = trainer_class(
        model=str(model),
        args=config_class(
            output_dir=str(folder), model_init_kwargs={"dtype": "float32"}, max_length=None, **(USUAL | settings)
        ),
        train_dataset=Dataset.from_dict(dataset),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        **arguments,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def loss_and_gradients(loss, model):
    model.zero_grad()
    loss.backward()
    return loss.item(), {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert found[1].keys() == wanted[1].keys()
    difference = torch.cat([(found[1][name] - gradient).flatten() for name, gradient in wanted[1].items()]).norm()
    assert difference < 1e-5 * torch.cat([gradient.flatten() for gradient in wanted[1].values()]).norm()


# --- SFT ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_sft_is_that_of_trl(folders, pairs, smoothing, tmp_path):
    from trl import SFTConfig, SFTTrainer

    texts = [pair.chosen for pair in pairs]
    trainer = trainer_of(
        SFTTrainer, SFTConfig, folders["policy"], {"prompt": ["2"] * 4, "completion": ["3"] * 4}, tmp_path,
        {"label_smoothing_factor": smoothing},
    )  # fmt: skip
    longest = max(len(text.token_ids) for text in texts)
    input_ids, mask = torch.zeros(2, len(texts), longest, dtype=torch.int64)
    labels = torch.full_like(input_ids, -100)
    for row, text in enumerate(texts):
        input_ids[row, : len(text.token_ids)] = torch.from_numpy(text.token_ids)
        mask[row, : len(text.token_ids)] = 1
        labels[row, text.num_prompt_tokens : len(text.token_ids)] = torch.from_numpy(
            text.token_ids[text.num_prompt_tokens :]
        )
    inputs = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
    theirs = loss_and_gradients(trainer.compute_loss(trainer.model, inputs), trainer.model)

    policy = load_policy(folders["policy"], temperature=1.0, precision="float32")
    lengths = [len(text.token_ids) - text.num_prompt_tokens for text in texts]
    weights_N = torch.from_numpy(np.concatenate(token_weights(lengths, "tokens", totals=loss_totals(lengths))))
    token_loss = differentiated(lambda logprobs_C, tokens: -weights_N[tokens] * logprobs_C)
    loss, _, _ = policy(pack(texts), token_loss=token_loss, label_smoothing=smoothing)
    assert_same(loss_and_gradients(loss, policy.model), theirs)


# --- DPO ---------------------------------------------------------------------------------------------------------

VARIANTS = {
    "sigmoid": ({"loss_type": "sigmoid"}, {}),
    "length-normalised": ({"loss_type": "sigmoid_norm"}, {"is_length_normalised": True}),
    "ipo": ({"loss_type": "ipo"}, {"kind": "ipo", "is_length_normalised": True}),
    "smoothed": ({"loss_type": "aot", "label_smoothing": 0.1}, {"label_smoothing": 0.1}),
}
"""By name: TRL's settings, and those of `preference_loss`."""


def examples(pairs):
    return [
        {
            "prompt_ids": pair.chosen.token_ids[: pair.chosen.num_prompt_tokens].tolist(),
            "chosen_ids": pair.chosen.token_ids[pair.chosen.num_prompt_tokens :].tolist(),
            "rejected_ids": pair.rejected.token_ids[pair.rejected.num_prompt_tokens :].tolist(),
        }
        for pair in pairs
    ]


def our_dpo(folders, pairs, options):
    batch = lay_out_pairs(pairs, is_padded=False, shares_prompts=True)
    policy, reference = (
        load_policy(folders[name], temperature=1.0, precision="float32") for name in ("policy", "reference")
    )

    def sums(model):
        return completion_logprobs(model(batch)[0], batch.num_completion_tokens).view(-1, 2).unbind(1)

    with torch.no_grad():
        reference_sums = sums(reference)
    tokens_P2 = torch.tensor(batch.num_completion_tokens).view(-1, 2)
    output = preference_loss(
        *sums(policy), *reference_sums, beta=BETA, chosen_tokens_P=tokens_P2[:, 0], rejected_tokens_P=tokens_P2[:, 1],
        **options,
    )  # fmt: skip
    return loss_and_gradients(output.losses_P.sum() / len(pairs), policy.model), output, reference_sums


def dpo_trainer(folders, folder, settings, **arguments):
    from trl import DPOConfig, DPOTrainer

    dataset = {"prompt": ["2"] * 4, "chosen": ["3"] * 4, "rejected": ["4"] * 4}
    return trainer_of(DPOTrainer, DPOConfig, folders["policy"], dataset, folder, {"beta": BETA} | settings, **arguments)


@pytest.mark.parametrize("name", VARIANTS)
def test_dpo_is_that_of_trl(folders, pairs, name, tmp_path):
    settings, options = VARIANTS[name]
    members = pairs[:1] if name == "smoothed" else pairs
    reference = LlamaForCausalLM.from_pretrained(folders["reference"])
    trainer = dpo_trainer(folders, tmp_path, settings, ref_model=reference)
    inputs = trainer.data_collator(examples(members))
    theirs = loss_and_gradients(trainer.compute_loss(trainer.model, inputs), trainer.model)
    ours, output, _ = our_dpo(folders, members, options)
    assert_same(ours, theirs)
    if not options.get("is_length_normalised"):  # TRL's rewards are of the whole completion whatever the loss
        logged = trainer._metrics["train"]
        assert output.chosen_rewards_P.mean().item() == pytest.approx(logged["rewards/chosen"][0], rel=1e-5)
        assert output.rejected_rewards_P.mean().item() == pytest.approx(logged["rewards/rejected"][0], rel=1e-5)


def test_dpo_with_log_probs_of_the_reference_from_before_is_that_of_trl(folders, pairs, tmp_path):
    ours, _, reference_sums = our_dpo(folders, pairs, {})
    trainer = dpo_trainer(folders, tmp_path, {"precompute_ref_log_probs": True})
    chosen, rejected = (sums_P.tolist() for sums_P in reference_sums)
    inputs = trainer.data_collator(
        [
            example | {"ref_chosen_logps": chosen[number], "ref_rejected_logps": rejected[number]}
            for number, example in enumerate(examples(pairs))
        ]
    )
    assert_same(ours, loss_and_gradients(trainer.compute_loss(trainer.model, inputs), trainer.model))


# --- reward models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_margins", [False, True])
@pytest.mark.parametrize("centring", [0.0, 0.01])
def test_a_reward_model_is_that_of_trl(folders, pairs, centring, has_margins, tmp_path):
    from trl import RewardConfig, RewardTrainer

    dataset = {"chosen": ["2 3"] * 4, "rejected": ["2 4"] * 4}
    trainer = trainer_of(
        RewardTrainer, RewardConfig, folders["reward"], dataset, tmp_path,
        {"center_rewards_coefficient": centring or None},
    )  # fmt: skip
    margins = [0.5, 0.0, 1.5]
    inputs = trainer.data_collator(
        [
            {"chosen_ids": pair.chosen.token_ids.tolist(), "rejected_ids": pair.rejected.token_ids.tolist()}
            | ({"margin": margin} if has_margins else {})
            for pair, margin in zip(pairs, margins, strict=True)
        ]
    )
    theirs = loss_and_gradients(trainer.compute_loss(trainer.model, inputs), trainer.model)

    reward_model = load_reward_model(folders["reward"], precision="float32", head_seed=0)
    batch = lay_out_pairs(pairs, is_padded=False, shares_prompts=True)
    losses_P = pair_reward_loss(
        *reward_model(batch, batch.last_index).view(-1, 2).unbind(1),
        margins_P=torch.tensor(margins) if has_margins else None,
        centring=centring,
    )
    assert_same(loss_and_gradients(losses_P.sum() / len(pairs), reward_model.model), theirs)
