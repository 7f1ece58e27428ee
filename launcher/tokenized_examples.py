"""Examples as the model learns them: their tokens, the first of them with their masks, and what is wrong with them.

In a process of its own, see `tokenizer_process`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from towline.launcher.marked_examples import marked
from towline.launcher.tokenized_prompts import NUM_RENDERED
from towline.launcher.tokenizer_process import ask, serve
from towline.storage.errors import DataError
from towline.storage.example_config import DemonstrationData, ExampleConfig, PreferenceData, StepData
from towline.storage.example_report import AnyExample
from towline.storage.records import Demonstration, LabelledSteps, Preference, Turn
from towline.trainer.example_lengths import (
    FittedExamples,
    LengthCounts,
    example_limit,
    fit_demonstrations,
    fit_pairs,
    fit_steps,
)
from towline.trainer.packing import TokenSequence
from towline.trainer.token_examples import TokenExample, TokenPair, TokenSteps

if TYPE_CHECKING:
    from towline.trainer.conversation import ConversationTokenizer

MAX_PROBLEMS_SHOWN = 3
_FIT: dict[type[ExampleConfig], Callable[..., FittedExamples[Any]]] = {
    DemonstrationData: fit_demonstrations,
    PreferenceData: fit_pairs,
    StepData: fit_steps,
}
_AnyTokens = TokenExample | TokenPair | TokenSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedExample:
    row: int
    texts: list[str]
    """As `marked_examples` writes them: two of a pair, chosen and rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedExamples:
    """One dataset. Tokens are those that are trained on, after over-long examples were cut or left out."""

    rows: list[int]
    """Of each example, its row in the dataset."""
    prompt_tokens: list[int]
    """Of each example: what stands before the first token that is learned."""
    learned_tokens: list[int]
    """Of each example; of a pair those of both completions, of a solution those of its steps."""
    rendered: list[RenderedExample]
    """The first examples."""
    lengths: LengthCounts | None
    """None where over-long examples are refused, or nothing could be tokenised."""
    problems: list[str]
    """Why a run with this dataset would not start."""
    warnings: list[str]


def tokenize_examples(
    model: Path, datasets: Sequence[tuple[ExampleConfig, Sequence[AnyExample]]], *, context_tokens: int | None
) -> list[TokenizedExamples]:
    """Tokenise, cut and render with the model's own tokenizer, each dataset as its config says.

    Args:
        datasets: several, each as its config and the examples of it.
        context_tokens: that the model can read; None where it does not say.

    Raises:
        ConfigError: a config allows more tokens than the model can read.
        ModelError: the folder's tokenizer cannot be loaded, or has no chat template when one is needed.
    """
    request = {
        "model": str(model),
        "datasets": [
            {
                "kind": type(config).__name__,
                "config": config.model_dump_json(),
                "max_tokens": example_limit(config.max_tokens, context_tokens),
                "examples": [dataclasses.asdict(example) for example in examples],
            }
            for config, examples in datasets
        ],
    }
    answer = ask("towline.launcher.tokenized_examples", model, request)
    return [_received(**dataset) for dataset in answer["datasets"]]


def _received(*, rendered: list[Any], lengths: Any, **others: Any) -> TokenizedExamples:
    return TokenizedExamples(
        rendered=[RenderedExample(**example) for example in rendered],
        lengths=None if lengths is None else LengthCounts(**lengths),
        **others,
    )


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    found = [_tokenize(Path(request["model"]), **dataset) for dataset in request["datasets"]]
    return {"datasets": [dataclasses.asdict(dataset) for dataset in found]}


def _tokenize(
    model: Path, *, kind: str, config: str, max_tokens: int | None, examples: list[dict[str, Any]]
) -> TokenizedExamples:
    from towline.trainer.conversation import ConversationTokenizer

    kinds = {kind.__name__: kind for kind in _FIT}
    settings = kinds[kind].model_validate_json(config)
    tokenizer = ConversationTokenizer(model, chat=settings.chat)
    tokenized: list[_AnyTokens] = []
    refused: list[str] = []
    for example in examples:
        try:
            tokenized.append(_token_example(tokenizer, settings, example))
        except DataError as error:
            refused.append(str(error))
    problems = refused[:MAX_PROBLEMS_SHOWN]
    if len(refused) > len(problems):
        problems.append(f"and {len(refused) - len(problems):,} more rows that cannot be tokenised")
    lengths = None
    if tokenized:
        try:
            fitted = _fit(settings, tokenized, max_tokens)
            tokenized, lengths = list(fitted.examples), fitted.counts
        except DataError as error:
            problems.append(str(error))
    return TokenizedExamples(
        rows=[example.row for example in tokenized],
        prompt_tokens=[_sequences(example)[0].num_prompt_tokens for example in tokenized],
        learned_tokens=[sum(len(ids) for ids in _learned(example)) for example in tokenized],
        rendered=[
            RenderedExample(row=example.row, texts=marked(tokenizer.decode, example))
            for example in tokenized[:NUM_RENDERED]
        ],
        lengths=lengths,
        problems=problems,
        warnings=_warnings(tokenizer, tokenized),
    )


def _token_example(tokenizer: "ConversationTokenizer", config: ExampleConfig, example: dict[str, Any]) -> _AnyTokens:
    match config:
        case DemonstrationData():
            return tokenizer.demonstration(Demonstration(**_with_turns(example, "turns")), turns=config.turns)
        case PreferenceData():
            return tokenizer.preference(Preference(**_with_turns(example, "prompt")))
        case StepData():
            judged = _with_turns(example, "prompt")
            judged |= {"steps": tuple(judged["steps"]), "labels": tuple(judged["labels"])}
            return tokenizer.steps(LabelledSteps(**judged), separator=config.separator)
        case _:
            raise AssertionError(f"found {type(config).__name__}, need a kind of example")


def _with_turns(example: dict[str, Any], name: str) -> dict[str, Any]:
    return example | {name: tuple(Turn(**turn) for turn in example[name])}


def _fit(config: ExampleConfig, examples: list[Any], max_tokens: int | None) -> FittedExamples[Any]:
    return _FIT[type(config)](examples, max_tokens=max_tokens, overlong=config.overlong)


def _sequences(example: _AnyTokens) -> list[TokenSequence]:
    return [example.chosen, example.rejected] if isinstance(example, TokenPair) else [example.tokens]


def _learned(example: _AnyTokens) -> list[Any]:
    """Ids, of each sequence."""
    completions = [tokens.token_ids[tokens.num_prompt_tokens :] for tokens in _sequences(example)]
    return [completions[0][example.trained]] if isinstance(example, TokenExample) else completions


def _warnings(tokenizer: "ConversationTokenizer", examples: Sequence[_AnyTokens]) -> list[str]:
    found: list[str] = []
    unstopped = tokenizer.unstopped_end
    if unstopped is not None and any(not isinstance(example, TokenSteps) for example in examples):
        token, text = unstopped
        found.append(
            f"the chat template ends a turn with {text}, at which generation does not stop: add {token} to "
            "eos_token_id in the model's generation_config.json"
        )
    unknown = tokenizer.unknown_token_id
    unwritten = sum(any(bool(np.any(ids == unknown)) for ids in _learned(example)) for example in examples)
    if unknown is not None and unwritten:
        found.append(
            f"{unwritten:,} of {len(examples):,} examples teach {tokenizer.decode([unknown])}, which stands for what "
            "the tokenizer cannot write"
        )
    return found


if __name__ == "__main__":
    serve(_answer)
