"""The small models of the fast demonstrations: Llamas that can do their task now and then.

Of 0.65 M parameters or fewer, they are trained from scratch (SFT) and stopped early on purpose: reinforcement learning
needs a model that succeeds often enough to be rewarded and not so often that nothing is left to learn.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from publish_folder import published_folder
from tasks import TASKS, Example, Task, splits
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HEAD_SIZE = 32
"""The smallest that vLLM's CPU build accepts."""
MAX_STEPS = 600
BATCH_SIZE = 128
WARMUP_STEPS = 20
EVALUATE_EVERY_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What a small model learns before reinforcement learning goes on."""

    task: str
    """One of `tasks.TASKS`, whose questions are of one length in tokens."""
    tokens: tuple[str, ...]
    """The vocabulary beside padding, end of sequence and unknown."""
    pieces: str
    """Regular expression of what is one token; a character is one elsewhere."""
    prompt: Callable[[Example], str]
    """The same text as that of the experiment's template."""
    completion: Callable[[Example], str]
    completion_tokens: int
    """Of every completion, with the end of sequence."""
    hidden_size: int
    num_layers: int
    learning_rate: float
    target_accuracy: float
    """Share of right answers at temperature 1 on the development questions at which training stops."""


def make_tiny_model(lesson: Lesson, destination: Path, seed: int = 0) -> None:
    """Train and publish the model with its tokenizer at `destination`; float32, so that CPU engines agree closely."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    with published_folder(destination) as folder:
        tokenizer = build_tokenizer(lesson)
        model = build_model(lesson, tokenizer)
        steps, accuracy = _train(lesson, model, tokenizer, seed)
        if accuracy < lesson.target_accuracy:
            raise SystemExit(
                f"{destination.name}: accuracy {accuracy:.3f} after {steps} steps, expected {lesson.target_accuracy}"
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    print(f"{destination.name}: {accuracy:.3f} right at temperature 1 after {steps} steps")


def build_tokenizer(lesson: Lesson) -> PreTrainedTokenizerFast:
    tokens = ["<pad>", "<eos>", "<unk>", *lesson.tokens]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{lesson.pieces}|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # the default would put a space between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def build_model(lesson: Lesson, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=lesson.hidden_size,
            num_hidden_layers=lesson.num_layers,
            num_attention_heads=lesson.hidden_size // HEAD_SIZE,
            num_key_value_heads=lesson.hidden_size // HEAD_SIZE,
            head_dim=HEAD_SIZE,
            intermediate_size=3 * lesson.hidden_size,
            max_position_embeddings=512,  # far more than a question needs: a weight probe reads 256 tokens
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _train(lesson: Lesson, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> tuple[int, float]:
    """Return the number of steps taken and the last accuracy."""
    parts = splits(lesson.task)
    kept_out = {example.question for examples in parts.values() for example in examples}
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lesson.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP_STEPS))
    accuracy = 0.0
    for step in range(1, MAX_STEPS + 1):
        _sft_step(lesson, model, tokenizer, _draw_batch(TASKS[lesson.task], rng, kept_out), optimizer)
        warmup.step()
        if step % EVALUATE_EVERY_STEPS == 0:
            accuracy = sampled_accuracy(lesson, model, tokenizer, parts["sft_dev"], generator)
            if accuracy >= lesson.target_accuracy:
                return step, accuracy
    return MAX_STEPS, accuracy


def _draw_batch(task: Task, rng: random.Random, kept_out: set[str]) -> list[Example]:
    batch: list[Example] = []
    while len(batch) < BATCH_SIZE:
        example = task.draw(rng)
        if example.question not in kept_out:
            batch.append(example)
    return batch


def _sft_step(
    lesson: Lesson,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    batch: list[Example],
    optimizer: torch.optim.Optimizer,
) -> None:
    """One optimiser step on completion tokens only; every row has the same length, so nothing is padded."""
    texts = [f"{lesson.prompt(example)}{lesson.completion(example)}{tokenizer.eos_token}" for example in batch]
    tokens_BT = torch.tensor(tokenizer(texts)["input_ids"])
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits[:, -lesson.completion_tokens - 1 : -1]
    loss = cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, -lesson.completion_tokens :].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def sampled_accuracy(
    lesson: Lesson,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    examples: list[Example],
    generator: torch.Generator | None,
) -> float:
    """Share of exactly right completions at temperature 1 or, without a generator, of the likeliest tokens."""
    next_BT = torch.tensor(tokenizer([lesson.prompt(example) for example in examples])["input_ids"])
    cache, sampled = DynamicCache(), []
    for _ in range(lesson.completion_tokens):
        logits_BV = model(input_ids=next_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        if generator is None:
            next_BT = logits_BV.argmax(-1, keepdim=True)
        else:
            next_BT = torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)
        sampled.append(next_BT)
    texts = tokenizer.batch_decode(torch.cat(sampled, dim=1))
    expected = [lesson.completion(example) + tokenizer.eos_token for example in examples]
    return sum(text == want for text, want in zip(texts, expected, strict=True)) / len(examples)
