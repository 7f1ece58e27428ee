"""What can be known of a run's examples before it starts: rows, repetitions, what is held out."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from towline.jobs.experiment import (
    DpoExperiment,
    RewardModelExperiment,
    SftExperiment,
    StepRewardExperiment,
    SupervisedExperiment,
)
from towline.launcher.experiment_file import ExperimentFile
from towline.launcher.findings import Examples, Findings
from towline.launcher.plan import trainer_plan
from towline.launcher.tokenized_examples import tokenize_examples
from towline.launcher.tokenized_prompts import can_tokenize
from towline.storage.errors import InputError
from towline.storage.example_config import DemonstrationData, PreferenceData, StepData
from towline.storage.examples import ExampleDataset, leakage, survey_demonstrations, survey_preferences, survey_steps
from towline.storage.halves import count_halves
from towline.storage.records import Demonstration, LabelledSteps, Preference

Config = TypeVar("Config", DemonstrationData, PreferenceData, StepData)
Example = TypeVar("Example", Demonstration, Preference, LabelledSteps)


def look_at_examples(found: Findings, file: ExperimentFile, experiment: SupervisedExperiment) -> None:
    """`found` has the model already."""
    match experiment:
        case SftExperiment(data=data, evaluation=evaluation):
            _look_at_data(found, data, evaluation.data if evaluation else None, survey_demonstrations)
        case DpoExperiment(data=data, evaluation=evaluation) | RewardModelExperiment(data=data, evaluation=evaluation):
            _look_at_data(found, data, evaluation.data if evaluation else None, survey_preferences)
        case StepRewardExperiment(data=data, evaluation=evaluation):
            _look_at_data(found, data, evaluation.data if evaluation else None, survey_steps)
    _tokenize(found, experiment)
    if isinstance(experiment, RewardModelExperiment) and experiment.watcher:
        _divide(found, experiment.seed)
    _look_at_batch(found, file, experiment)
    if found.model is not None:
        found.plan = trainer_plan(experiment, found.model)


def _look_at_data(
    found: Findings, train: Config, held_out: Config | None, survey: Callable[[Config], ExampleDataset[Example]]
) -> None:
    learned = _read(found, "data", train, survey)
    kept = None if held_out is None else _read(found, "evaluation.data", held_out, survey)
    if learned is not None:
        found.train_examples = Examples(key="data", data=learned, overlong=train.overlong)
    if held_out is not None and kept is not None:
        found.held_out_examples = Examples(key="evaluation.data", data=kept, overlong=held_out.overlong)
    if kept is not None and len(kept.rows) < 2:
        found.problems.append("evaluation.data: one example has no interval: hold out at least two, better hundreds.")
    if learned is not None and kept is not None:
        _look_for_leakage(found, learned, kept)


def _read(
    found: Findings, key: str, config: Config, survey: Callable[[Config], ExampleDataset[Example]]
) -> ExampleDataset[Example] | None:
    """Rows that make no example are a problem, the others are looked at all the same."""
    try:
        data = survey(config)
    except InputError as error:
        found.problems.append(f"{key}: {error}")
        return None
    report = data.report
    if report.num_rejected:
        more = report.num_rejected - len(report.rejected)
        lines = [f"{key}: {report.num_rejected} of {report.num_rows + report.num_rejected} rows cannot be used"]
        found.problems.append("\n  ".join([*lines, *report.rejected, *([f"and {more} more"] if more else [])]))
    return data


def _tokenize(found: Findings, experiment: SupervisedExperiment) -> None:
    """All datasets at once: starting the tokenizer takes longer than using it."""
    datasets = [examples for examples in (found.train_examples, found.held_out_examples) if examples is not None]
    model = found.model
    if model is None or not datasets:
        return
    if not can_tokenize():
        found.warnings.append("tokens of the examples were not counted: transformers is not installed here")
        return
    configs = {"data": experiment.data, "evaluation.data": experiment.evaluation and experiment.evaluation.data}
    asked = [(config, one.data.rows) for one in datasets if (config := configs[one.key]) is not None]
    tokenized = found.attempt(
        lambda: tokenize_examples(experiment.policy.folder, asked, context_tokens=model.max_positions)
    )
    for examples, counted in zip(datasets, tokenized or [], strict=False):
        examples.tokenized = counted
        found.problems += (f"{examples.key}: {problem}" for problem in counted.problems)
        found.warnings += (f"{examples.key}: {warning}" for warning in counted.warnings)


def _divide(found: Findings, seed: int) -> None:
    """Into halves, of each of which a model learns what is not left out as over-long."""
    if (examples := found.train_examples) is None:
        return
    rows = examples.data.rows
    kept = {row.row for row in rows} if examples.tokenized is None else set(examples.tokenized.rows)
    found.halves = count_halves((row for row in rows if row.row in kept), seed)


def _look_at_batch(found: Findings, file: ExperimentFile, experiment: SupervisedExperiment) -> None:
    batch, key = experiment.trainer.batch_size, "trainer.batch_size"
    for name, num_examples in _learned_from(found):
        if batch > num_examples:
            found.problems.append(
                f"{file.where(key)}: {key} ({batch}) must be at most the {num_examples} examples of {name}: a step "
                "never holds one twice."
            )


def _learned_from(found: Findings) -> Iterator[tuple[str, int]]:
    """What a model learns from, and how many examples that are."""
    examples = found.train_examples
    if found.halves:
        yield from ((f"the {count.half} half of data.train", count.num_pairs) for count in found.halves)
    elif examples is not None:
        lengths = examples.tokenized.lengths if examples.tokenized is not None else None
        half = f"the {examples.data.half} half of " if examples.data.half is not None else ""
        yield f"{half}data.train", len(examples.data.rows) - (lengths.num_dropped if lengths is not None else 0)


def _look_for_leakage(found: Findings, train: ExampleDataset[Example], held_out: ExampleDataset[Example]) -> None:
    """Held-out prompts that are trained on say nothing about what was learned."""
    shared = leakage(train, held_out)
    if not shared:
        return
    text = f"evaluation.data: {len(shared)} of {len(held_out.rows)} held-out prompts are also in data.train"
    if len(shared) == len(held_out.rows):
        found.problems.append(f"{text}: an evaluation on them measures memory. Hold prompts out of the training data.")
    else:
        found.warnings.append(f"{text}; what is measured will be too good by what is remembered")
