"""The small model of the fast demonstration: a Llama of 0.65 M parameters that can sort five digits now and then.

It is trained from scratch (SFT) and stopped early on purpose: reinforcement learning needs a model that succeeds at
temperature 1 often enough to be rewarded and not so often that nothing is left to learn. The head size of 32 is the
smallest that vLLM's CPU build accepts.
"""

import random
from pathlib import Path

import torch
from publish_folder import published_folder
from tasks import SORT_DIGITS, Example, draw_sort, splits
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TARGET_ACCURACY = 0.25
"""Share of right answers at temperature 1 on the development questions at which training stops."""
MAX_STEPS = 600
BATCH_SIZE = 128
LEARNING_RATE = 1e-3
WARMUP_STEPS = 20
EVALUATE_EVERY_STEPS = 5
COMPLETION_TOKENS = SORT_DIGITS + 3  # opening, digits, closing, end of sequence


def make_tiny_sort(destination: Path, seed: int = 0) -> None:
    """Train and publish the model with its tokenizer at `destination`; float32, so that CPU engines agree closely."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with published_folder(destination) as folder:
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        steps, accuracy = _train(model, tokenizer, seed)
        if accuracy < TARGET_ACCURACY:
            raise SystemExit(f"tiny-sort: accuracy {accuracy:.3f} after {steps} steps, expected {TARGET_ACCURACY}")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    print(f"tiny-sort: {accuracy:.3f} right at temperature 1 after {steps} steps")


def build_tokenizer() -> PreTrainedTokenizerFast:
    r"""One token a character, with `\boxed{` as a single token so that an answer is short."""
    tokens = ["<pad>", "<eos>", "<unk>", "\\boxed{", "}", *"0123456789abcdefghijklmnopqrstuvwxyz+-*=?:, "]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\\boxed\{|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # the default would put a space between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            intermediate_size=384,
            max_position_embeddings=512,  # far more than a question needs: a weight probe reads 256 tokens
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> tuple[int, float]:
    """Return the number of steps taken and the last accuracy."""
    parts = splits("sort")
    kept_out = {example.question for examples in parts.values() for example in examples}
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    accuracy = 0.0
    for step in range(1, MAX_STEPS + 1):
        _sft_step(model, tokenizer, _draw_batch(rng, kept_out), optimizer)
        warmup.step()
        if step % EVALUATE_EVERY_STEPS == 0:
            accuracy = sampled_accuracy(model, tokenizer, parts["sft_dev"], generator)
            if accuracy >= TARGET_ACCURACY:
                return step, accuracy
    return MAX_STEPS, accuracy


def _draw_batch(rng: random.Random, kept_out: set[str]) -> list[Example]:
    batch: list[Example] = []
    while len(batch) < BATCH_SIZE:
        example = draw_sort(rng)
        if example.question not in kept_out:
            batch.append(example)
    return batch


def _sft_step(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batch: list[Example],
    optimizer: torch.optim.Optimizer,
) -> None:
    """One optimiser step on completion tokens only; every row has the same length, so nothing is padded."""
    texts = [f"{_prompt(example)}{_completion(example)}{tokenizer.eos_token}" for example in batch]
    tokens_BT = torch.tensor(tokenizer(texts)["input_ids"])
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits[:, -COMPLETION_TOKENS - 1 : -1]
    loss = cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, -COMPLETION_TOKENS:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def _prompt(example: Example) -> str:
    """The same text as jobs/experiments/prompts/sort.txt."""
    return f"sort:{example.question}="


def _completion(example: Example) -> str:
    return f"\\boxed{{{example.answer}}}"


@torch.no_grad()
def sampled_accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    generator: torch.Generator | None,
) -> float:
    """Share of exactly right completions at temperature 1 or, without a generator, of the likeliest tokens."""
    next_BT = torch.tensor(tokenizer([_prompt(example) for example in examples])["input_ids"])
    cache, sampled = DynamicCache(), []
    for _ in range(COMPLETION_TOKENS):
        logits_BV = model(input_ids=next_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if generator is None:
            next_BT = logits_BV.argmax(-1, keepdim=True)
        else:
            next_BT = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        sampled.append(next_BT)
    texts = tokenizer.batch_decode(torch.cat(sampled, dim=1))
    expected = [_completion(example) + tokenizer.eos_token for example in examples]
    return sum(text == want for text, want in zip(texts, expected, strict=True)) / len(examples)
