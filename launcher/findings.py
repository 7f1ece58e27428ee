"""What was found of an experiment before anything of it starts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from towline.launcher.model_folder import ModelSizes
from towline.launcher.plan import Plan
from towline.launcher.tokenized_examples import TokenizedExamples
from towline.rollout.sandbox.isolation import Isolation
from towline.storage.datasets import PromptDataset
from towline.storage.errors import InputError
from towline.storage.example_config import Overlong
from towline.storage.examples import ExampleDataset
from towline.storage.halves import HalfCount

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Prompts:
    """A dataset and the tokens of each prompt."""

    key: str
    """Where the experiment says it: `data` or `evaluation.data`."""
    data: PromptDataset
    chat: bool
    tokens: tuple[int, ...] | None = None
    """None where they could not be counted."""
    rendered: tuple[str, ...] = ()
    """The first prompts as the model reads them, where its tokenizer can be loaded."""


@dataclass(slots=True, kw_only=True)
class Examples:
    """A dataset that is learned from, or held out."""

    key: str
    """Where the experiment says it: `data` or `evaluation.data`."""
    data: ExampleDataset[Any]
    overlong: Overlong
    tokenized: TokenizedExamples | None = None
    """None where they could not be counted."""


@dataclass(slots=True, kw_only=True)
class Findings:
    problems: list[str] = field(default_factory=list[str])
    warnings: list[str] = field(default_factory=list[str])
    model: ModelSizes | None = None
    train: Prompts | None = None
    held_out: Prompts | None = None
    train_examples: Examples | None = None
    held_out_examples: Examples | None = None
    halves: list[HalfCount] = field(default_factory=list[HalfCount])
    """Of the training pairs, where a model is trained on each."""
    plan: Plan | None = None
    isolation: Isolation | None = None
    """What shuts in the programs of a code reward on this machine; None where none are run, or nothing does."""

    def attempt(self, find: Callable[[], T]) -> T | None:
        """Note the InputError that `find` raises, so that one problem does not hide the next."""
        try:
            return find()
        except InputError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return None
