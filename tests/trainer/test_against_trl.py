"""Losses and gradients beside those of TRL's GRPOTrainer, on one model and one batch.

Both are given the same advantages, so that the one place where they are meant to differ is apart: TRL divides by the
sample standard deviation of a group, Towline by the population's (last test).
"""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from towline.trainer.advantages import step_advantages
from towline.trainer.losses import policy_loss
from towline.trainer.normaliser import loss_totals, token_weights
from towline.trainer.packing import TokenSequence, pack
from towline.trainer.policy import load_policy

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

VOCABULARY, TEMPERATURE, LONGEST, BETA = 97, 0.7, 9, 0.04
PROMPTS = (3, 3, 5, 5)
COMPLETIONS = (9, 4, 2, 7)
VARIANTS = {
    "grpo": ({"loss_type": "grpo"}, {}, "sequence"),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {}, "constant"),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"clip_high": 0.28}, "tokens"),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.04},
        {"ratio_level": "sequence", "clip_low": 0.02, "clip_high": 0.04},
        "sequence",
    ),
    # TRL's bound is the ratio itself, and it has no lower one.
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.1},
        {"surrogate": "cispo", "clip_low": 1.0, "clip_high": 0.1},
        "tokens",
    ),
    "unbiased": ({"loss_type": "dapo", "use_bias_correction_kl": True}, {"kl_estimator": "k3_unbiased"}, "tokens"),
}
"""By name: TRL's settings, those of `policy_loss`, and the normaliser."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {str(number): number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
    )
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def batch(model):
    """Token ids, old and reference log-probs and advantages of four completions."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(2, VOCABULARY, p + c) for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    policy = load_policy(model, temperature=TEMPERATURE, precision="float32")
    packed = pack([TokenSequence(token_ids=t, num_prompt_tokens=p) for t, p in zip(tokens, PROMPTS, strict=True)])
    with torch.no_grad():
        own = policy(packed)[0]
    torch.manual_seed(1)
    old, reference = own + 0.15 * torch.randn_like(own), own + 0.3 * torch.randn_like(own)
    return {"tokens": tokens, "old": old, "reference": reference, "advantages": torch.tensor([1.3, -0.4, 0.9, -1.8])}


def ours(model, batch, options, normaliser):
    policy = load_policy(model, temperature=TEMPERATURE, precision="float32")
    sequences = [TokenSequence(token_ids=t, num_prompt_tokens=p) for t, p in zip(batch["tokens"], PROMPTS, strict=True)]
    totals = loss_totals(COMPLETIONS)
    constant = len(COMPLETIONS) * LONGEST if normaliser == "constant" else None
    weights = np.concatenate(token_weights(COMPLETIONS, normaliser, totals=totals, constant=constant))
    loss = policy_loss(
        policy(pack(sequences))[0],
        batch["old"],
        torch.repeat_interleave(batch["advantages"], torch.tensor(COMPLETIONS)),
        torch.from_numpy(weights),
        reference_logprobs_T=batch["reference"],
        kl_beta=BETA,
        lengths=COMPLETIONS if options.get("ratio_level") == "sequence" else None,
        **options,
    ).loss
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in policy.model.named_parameters()}


def theirs(model, batch, settings, folder):
    """The padded tensors that TRL's own collation makes, through its `_compute_loss`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=str(model),
        args=GRPOConfig(
            output_dir=str(folder), per_device_train_batch_size=len(COMPLETIONS), num_generations=2, beta=BETA,
            temperature=TEMPERATURE, max_completion_length=LONGEST, use_cpu=True, report_to=[], bf16=False,
            model_init_kwargs={"dtype": "float32"}, **({"use_bias_correction_kl": False} | settings),
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["2"] * 8}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = padded(batch)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in trainer.model.named_parameters()}


def padded(batch):
    longest_prompt, size = max(PROMPTS), len(PROMPTS)
    inputs = {
        "prompt_ids": torch.zeros(size, longest_prompt, dtype=torch.int64),
        "prompt_mask": torch.zeros(size, longest_prompt, dtype=torch.int64),
        "completion_ids": torch.zeros(size, LONGEST, dtype=torch.int64),
        "completion_mask": torch.zeros(size, LONGEST, dtype=torch.int64),
        "old_per_token_logps": torch.zeros(size, LONGEST),
        "ref_per_token_logps": torch.zeros(size, LONGEST),
        "advantages": batch["advantages"],
        "num_items_in_batch": torch.tensor(sum(COMPLETIONS)),
    }
    start = 0
    for row, (tokens, prompt, length) in enumerate(zip(batch["tokens"], PROMPTS, COMPLETIONS, strict=True)):
        inputs["prompt_ids"][row, longest_prompt - prompt :] = torch.from_numpy(tokens[:prompt])
        inputs["prompt_mask"][row, longest_prompt - prompt :] = 1
        inputs["completion_ids"][row, :length] = torch.from_numpy(tokens[prompt:])
        inputs["completion_mask"][row, :length] = 1
        inputs["old_per_token_logps"][row, :length] = batch["old"][start : start + length]
        inputs["ref_per_token_logps"][row, :length] = batch["reference"][start : start + length]
        start += length
    return inputs


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradient_are_those_of_trl(model, batch, name, tmp_path):
    settings, options, normaliser = VARIANTS[name]
    loss, gradients = ours(model, batch, options, normaliser)
    their_loss, their_gradients = theirs(model, batch, settings, tmp_path)
    assert loss == pytest.approx(their_loss, rel=1e-5)
    assert gradients.keys() == their_gradients.keys()
    difference = torch.cat([(gradients[name] - their_gradients[name]).flatten() for name in gradients]).norm()
    size = torch.cat([gradient.flatten() for gradient in their_gradients.values()]).norm()
    assert difference / size < 1e-5


def test_towline_divides_by_the_population_deviation_and_trl_by_that_of_a_sample():
    """For a group of G the two differ by the factor sqrt(G / (G - 1)), the same for every completion of a group."""
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    (population,) = step_advantages([rewards], epsilon=0.0)
    sample = (torch.tensor(rewards) - 0.5) / torch.tensor(rewards).std()
    np.testing.assert_allclose(population, [1, -1, -1, 1])
    np.testing.assert_allclose(population, np.sqrt(4 / 3) * sample.numpy())
