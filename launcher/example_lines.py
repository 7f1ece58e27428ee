"""What a terminal shows of a dataset of examples."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from towline.launcher.text import printable
from towline.launcher.tokenized_examples import RenderedExample, TokenizedExamples
from towline.storage.dataset_files import shown
from towline.storage.example_config import Overlong
from towline.storage.example_report import ExampleReport, Lengths
from towline.storage.examples import ExampleDataset
from towline.storage.halves import HalfCount
from towline.storage.records import Demonstration, Preference
from towline.trainer.example_lengths import LengthCounts


def example_lines(
    name: str, dataset: ExampleDataset[Any], tokenized: TokenizedExamples | None, overlong: Overlong
) -> Iterator[str]:
    """
    Args:
        name: what the dataset is for, such as "train".
        tokenized: None where there is no tokenizer.
    """
    report = dataset.report
    source = shown(Path(dataset.source)) if Path(dataset.source).is_absolute() else dataset.source
    if dataset.half is not None:
        source = f"{dataset.half} half of {source}"
    yield (
        f"data    {name}   {report.num_rows:,} {_kind(dataset)}, {report.num_duplicates:,} of them again, "
        f"{report.num_rejected:,} rows rejected   {source}"
    )
    if tokenized is None:
        yield from _characters(report)
    else:
        yield from _tokens(tokenized, overlong)
    yield from _doubts(report)
    for example in [] if tokenized is None else tokenized.rendered:
        yield from _rendered(example)


def half_lines(halves: Sequence[HalfCount]) -> Iterator[str]:
    """What each of two models learns from; nothing where the data is not divided."""
    for count in halves:
        yield (
            f"data    {count.half} half   {count.num_pairs:,} preferences on {count.num_prompts:,} prompts, for the "
            f"{'reward model' if count.half == 'first' else 'watcher'}"
        )


def _kind(dataset: ExampleDataset[Any]) -> str:
    match dataset.rows[0]:
        case Demonstration():
            return "demonstrations"
        case Preference():
            return "preferences"
        case _:
            return "judged solutions"


def _characters(report: ExampleReport) -> Iterator[str]:
    for name, lengths in (("prompt", report.prompt_chars), ("completion", report.completion_chars)):
        yield f"        characters of a {name}: {_quantiles(lengths)}"


def _tokens(tokenized: TokenizedExamples, overlong: Overlong) -> Iterator[str]:
    for name, counts in (("before", tokenized.prompt_tokens), ("learned", tokenized.learned_tokens)):
        if counts:
            p50, p95, most = np.quantile(counts, [0.5, 0.95, 1.0], method="inverted_cdf")
            yield f"        tokens {name}: {_quantiles(Lengths(p50=int(p50), p95=int(p95), max=int(most)))}"
    if tokenized.lengths is not None and tokenized.lengths.num_overlong:
        yield f"        {_overlong(tokenized.lengths, overlong)}"


def _overlong(counts: LengthCounts, overlong: Overlong) -> str:
    return (
        f"{counts.num_overlong:,} of {counts.num_examples:,} have more than {counts.max_tokens:,} tokens, row "
        f"{counts.longest_row} has {counts.longest_tokens:,}: {counts.num_truncated:,} cut, {counts.num_dropped:,} "
        f'left out (overlong = "{overlong}")'
    )


def _doubts(report: ExampleReport) -> Iterator[str]:
    if report.num_identical_pairs:
        yield f"        {report.num_identical_pairs:,} with chosen the same as rejected, of which nothing is learned"
    if report.num_contradictions:
        yield f"        {report.num_contradictions:,} that an earlier row has the other way round"


def _rendered(example: RenderedExample) -> Iterator[str]:
    names = [""] if len(example.texts) == 1 else [", chosen", ", rejected"]
    for name, text in zip(names, example.texts, strict=True):
        yield f"        row {example.row}{name}"
        yield from (f"          | {printable(line)}" for line in text.split("\n"))


def _quantiles(lengths: Lengths) -> str:
    return f"{lengths.p50:,} median, {lengths.p95:,} p95, {lengths.max:,} max"
