"""What a dataset of examples is like, and what in it may not be meant: repetitions, contradictions, pairs of one."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from towline.storage.datasets import MAX_REJECTIONS_SHOWN
from towline.storage.records import Demonstration, LabelledSteps, Preference

AnyExample = Demonstration | Preference | LabelledSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Characters; each is a length that occurs."""

    p50: int
    p95: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleReport:
    num_rows: int
    """Rows that make an example."""
    num_duplicates: int
    """Rows that say the same as an earlier one: prompt and completion, prompt and pair, prompt and steps. Kept."""
    num_contradictions: int
    """Preferences that an earlier row has the other way round. Kept."""
    num_identical_pairs: int
    """Preferences of which chosen is rejected, see `Preference.identical_pair`. Kept."""
    prompt_chars: Lengths
    """Of what stands before the last completion."""
    completion_chars: Lengths
    """Of the last turn, of chosen and rejected each, or of each step."""
    num_rejected: int
    """Rows that make no example."""
    rejected: tuple[str, ...]
    """The first of them: where, what was found, what was expected."""


def report(examples: Sequence[AnyExample], rejected: Sequence[str]) -> ExampleReport:
    """
    Args:
        examples: at least one.
        rejected: where and why, of every row that makes none.
    """
    said = {(example.prompt, example.completions) for example in examples}
    pairs = [example for example in examples if isinstance(example, Preference)]
    return ExampleReport(
        num_rows=len(examples),
        num_duplicates=len(examples) - len(said),
        num_contradictions=_num_contradictions(pairs),
        num_identical_pairs=sum(pair.identical_pair for pair in pairs),
        prompt_chars=_lengths([sum(len(turn.content) for turn in example.prompt) for example in examples]),
        completion_chars=_lengths([len(text) for example in examples for text in example.completions]),
        num_rejected=len(rejected),
        rejected=tuple(rejected[:MAX_REJECTIONS_SHOWN]),
    )


def _num_contradictions(pairs: Sequence[Preference]) -> int:
    earlier: set[tuple[object, str, str]] = set()
    found = 0
    for pair in pairs:
        found += not pair.identical_pair and (pair.prompt, pair.rejected, pair.chosen) in earlier
        earlier.add((pair.prompt, pair.chosen, pair.rejected))
    return found


def _lengths(chars: Sequence[int]) -> Lengths:
    p50, p95 = np.quantile(chars, [0.5, 0.95], method="inverted_cdf")
    return Lengths(p50=int(p50), p95=int(p95), max=max(chars))
