"""Examples of a dataset, to be imitated, preferred or judged: read once, whole, checked row by row, and identified by a
digest. The records are in `records`; what makes a row one of them is in `example_rows`.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from towline.storage.dataset_rows import SourceRow, source_rows
from towline.storage.datasets import Rejected, read_template, rejection
from towline.storage.errors import DataError
from towline.storage.example_config import DemonstrationData, ExampleConfig, Half, PreferenceData, StepData
from towline.storage.example_report import AnyExample, ExampleReport, report
from towline.storage.example_rows import Template, demonstration, labelled_steps, preference
from towline.storage.halves import half_of
from towline.storage.records import Demonstration, LabelledSteps, Preference

Example = TypeVar("Example", Demonstration, Preference, LabelledSteps)
Config = TypeVar("Config", bound=ExampleConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleDataset(Generic[Example]):
    source: str
    """The file, folder or task."""
    rows: tuple[Example, ...]
    """In the order of the source; `rows[i].row == i` where no half is left out."""
    digest: str
    """blake2b over all that every example holds, in order."""
    report: ExampleReport
    """Of the rows above, and of those that make no example."""
    half: Half | None = None
    """Which half of the source this is; None: all of it."""


def load_demonstrations(config: DemonstrationData) -> ExampleDataset[Demonstration]:
    """Read a dataset of which every row is good.

    Raises:
        DataError: naming up to ten bad rows, or saying what is wrong with the source as a whole.
        ConfigError: the template cannot be read or has not exactly one placeholder.
    """
    return _whole(survey_demonstrations(config))


def load_preferences(config: PreferenceData) -> ExampleDataset[Preference]:
    """As `load_demonstrations`."""
    return _whole(survey_preferences(config))


def load_steps(config: StepData) -> ExampleDataset[LabelledSteps]:
    """As `load_demonstrations`."""
    return _whole(survey_steps(config))


def survey_demonstrations(config: DemonstrationData) -> ExampleDataset[Demonstration]:
    """Read what is good of a dataset and report the rest: for showing, not for training."""
    return _survey(config, demonstration)


def survey_preferences(config: PreferenceData) -> ExampleDataset[Preference]:
    """As `survey_demonstrations`."""
    return _survey(config, preference)


def survey_steps(config: StepData) -> ExampleDataset[LabelledSteps]:
    """As `survey_demonstrations`."""
    return _survey(config, labelled_steps)


def leakage(train: ExampleDataset[Example], held_out: ExampleDataset[Example]) -> list[Example]:
    """Held-out examples whose prompt, all that stands before the last completion, is one of training too."""
    learned = {example.prompt for example in train.rows}
    return [example for example in held_out.rows if example.prompt in learned]


def _whole(dataset: ExampleDataset[Example]) -> ExampleDataset[Example]:
    if dataset.report.num_rejected:
        raise rejection(dataset.source, dataset.report.num_rejected, dataset.report.rejected)
    return dataset


def _survey(
    config: Config, example_of: Callable[[int, SourceRow, Config, Template], Example]
) -> ExampleDataset[Example]:
    template = read_template(config.template)
    found: list[Example] = []
    rejected: list[str] = []
    for row in source_rows(config):
        try:
            found.append(example_of(len(found), row, config, template))
        except Rejected as reason:
            rejected.append(f"{row.where}: {reason}")
    if not found and not rejected:
        raise DataError(f"{config.train} has no rows")
    if not found:
        raise rejection(config.train, len(rejected), rejected)
    examples = [example for example in found if _is_wanted(example, config)]
    if not examples:
        raise DataError(
            f"{config.train}: all of its {len(found)} pairs are in the other half, into which their prompts fall by "
            "half_seed. Expected hundreds of different prompts; leave half out where there are so few"
        )
    return ExampleDataset(
        source=config.train,
        rows=tuple(examples),
        digest=_digest(examples),
        report=report(examples, rejected),
        half=config.half if isinstance(config, PreferenceData) else None,
    )


def _is_wanted(example: AnyExample, config: ExampleConfig) -> bool:
    """Everything is but pairs of the half that was not asked for."""
    if not isinstance(config, PreferenceData) or config.half is None:
        return True
    return half_of(example.prompt, config.half_seed) == config.half


def _digest(examples: Sequence[AnyExample]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for example in examples:
        texts = list(_texts(example))
        # With their number and each length before them, texts cannot move from one row or field to the next unnoticed.
        digest.update(len(texts).to_bytes(8, "little"))
        for text in texts:
            encoded = text.encode("utf-8")
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.hexdigest()


def _texts(example: AnyExample) -> Iterator[str]:
    """All that an example holds."""
    for turn in example.prompt:
        yield from (turn.role, turn.content)
    yield from example.completions
    match example:
        case Preference():
            yield repr(example.margin)
        case LabelledSteps():
            yield repr(example.labels)
        case Demonstration():
            pass
