"""Examples as token ids, on every rank: each needs the lengths of all to plan a step."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
import torch.distributed as dist

from towline.jobs.experiment import SupervisedExperiment
from towline.jobs.role import Role
from towline.storage.example_config import DemonstrationData, ExampleConfig, PreferenceData, StepData
from towline.storage.examples import load_demonstrations, load_preferences, load_steps
from towline.storage.schedule import PromptSchedule
from towline.trainer.conversation import ConversationTokenizer
from towline.trainer.example_lengths import LengthCounts, example_limit, fit_demonstrations, fit_pairs, fit_steps
from towline.trainer.packing import TokenSequence
from towline.trainer.token_examples import TokenExample, TokenPair, TokenSteps

_Row = TypeVar("_Row")
_Tokens = TypeVar("_Tokens")


def token_demonstrations(
    role: Role, experiment: SupervisedExperiment, data: DemonstrationData, context_tokens: int | None
) -> Sequence[TokenExample]:
    """
    Args:
        context_tokens: that the model can read; None where it does not say.
    """
    tokenizer = ConversationTokenizer(experiment.policy.folder, chat=data.chat)
    rows = load_demonstrations(data).rows
    examples = _each(role, rows, lambda row: tokenizer.demonstration(row, turns=data.turns))
    limit = example_limit(data.max_tokens, context_tokens)
    fitted = fit_demonstrations(examples, max_tokens=limit, overlong=data.overlong)
    _tell(data, fitted.counts)
    return fitted.examples


def token_pairs(
    role: Role, experiment: SupervisedExperiment, data: PreferenceData, context_tokens: int | None
) -> Sequence[TokenPair]:
    """As `token_demonstrations`."""
    tokenizer = ConversationTokenizer(experiment.policy.folder, chat=data.chat)
    examples = _each(role, load_preferences(data).rows, tokenizer.preference)
    fitted = fit_pairs(examples, max_tokens=example_limit(data.max_tokens, context_tokens), overlong=data.overlong)
    _tell(data, fitted.counts)
    return fitted.examples


def token_steps(
    role: Role, experiment: SupervisedExperiment, data: StepData, context_tokens: int | None
) -> Sequence[TokenSteps]:
    """As `token_demonstrations`."""
    tokenizer = ConversationTokenizer(experiment.policy.folder, chat=data.chat)
    examples = _each(role, load_steps(data).rows, lambda row: tokenizer.steps(row, separator=data.separator))
    fitted = fit_steps(examples, max_tokens=example_limit(data.max_tokens, context_tokens), overlong=data.overlong)
    _tell(data, fitted.counts)
    return fitted.examples


def context_tokens(model: object) -> int | None:
    """That a transformers model can read."""
    config = getattr(model, "config").get_text_config()  # noqa: B009
    return getattr(config, "max_position_embeddings", None)


def example_schedule(num_examples: int, experiment: SupervisedExperiment) -> PromptSchedule:
    """Shuffled epochs: no example comes twice within one."""
    return PromptSchedule(num_examples, experiment.trainer.batch_size, experiment.seed, key="trainer.batch_size")


def data_hash(sequences: Iterable[TokenSequence], extra: object, schedule: PromptSchedule) -> str:
    """Of everything that says what a step trains on.

    Args:
        extra: of the examples beside their tokens, such as masks and margins; as JSON has it.
    """
    settings = [schedule.prompts_per_step, schedule.seed, extra]
    return hashlib.blake2b((token_digest(sequences) + json.dumps(settings)).encode(), digest_size=16).hexdigest()


def token_digest(sequences: Iterable[TokenSequence]) -> str:
    """Of the token ids of all sequences and where their prompts end, in order."""
    hasher = hashlib.blake2b(digest_size=16)
    for sequence in sequences:
        # With its length before it a token cannot move from one sequence to the next unnoticed.
        hasher.update(np.array([len(sequence.token_ids), sequence.num_prompt_tokens], dtype=np.int64).tobytes())
        hasher.update(np.asarray(sequence.token_ids, dtype=np.int64).tobytes())
    return hasher.hexdigest()


def _each(role: Role, rows: Sequence[_Row], tokenize: Callable[[_Row], _Tokens]) -> list[_Tokens]:
    tokens: list[_Tokens] = []
    for row in rows:
        role.heartbeat.beat("tokenize")
        tokens.append(tokenize(row))
    return tokens


def _tell(data: ExampleConfig, counts: LengthCounts) -> None:
    if counts.num_overlong and dist.get_rank() == 0:
        print(
            f"{data.train}: {counts.num_overlong} of {counts.num_examples} examples have more than {counts.max_tokens} "
            f"tokens: {counts.num_truncated} were cut at their end, {counts.num_dropped} left out",
            flush=True,
        )
