"""Prompts of a dataset: read once, whole, checked row by row, and identified by a digest.

Answers stay as the dataset has them: what `#### 18` or `\\boxed{18}` means is known to the rewards.
"""

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from towline.storage.data_config import DataConfig
from towline.storage.dataset_rows import SourceRow, json_kind, missing_field, source_rows
from towline.storage.errors import ConfigError, DataError
from towline.storage.records import Prompt

PLACEHOLDER = "{prompt}"
MAX_REJECTIONS_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetReport:
    num_rows: int
    """Rows that make a prompt."""
    num_duplicates: int
    """Rows whose prompt text an earlier row has; they are kept."""
    prompt_chars_p50: int
    """Median length of the prompts after the template, in characters."""
    prompt_chars_p95: int
    prompt_chars_max: int
    num_rejected: int
    """Rows that make no prompt."""
    rejected: tuple[str, ...]
    """The first of them: where, what was found, what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDataset:
    source: str
    """The file, folder or task."""
    prompts: tuple[Prompt, ...]
    """In the order of the source; `prompts[i].row == i`."""
    digest: str
    """blake2b over every prompt's text (after the template) and answer, in order."""
    report: DatasetReport


class Rejected(Exception):
    """A row is not what it should be; the message says why."""


def load_prompts(config: DataConfig) -> PromptDataset:
    """Read a dataset of which every row is good.

    Raises:
        DataError: naming up to ten bad rows, or saying what is wrong with the source as a whole.
        ConfigError: the template cannot be read or has not exactly one placeholder.
    """
    dataset = survey_prompts(config)
    if dataset.report.num_rejected:
        raise rejection(dataset.source, dataset.report.num_rejected, dataset.report.rejected)
    return dataset


def survey_prompts(config: DataConfig) -> PromptDataset:
    """Read what is good of a dataset and report the rest: for showing, not for training."""
    before, after = read_template(config.template)
    prompts: list[Prompt] = []
    rejected: list[str] = []
    for source_row in source_rows(config):
        try:
            question, answer = _question_and_answer(source_row, config)
            prompts.append(Prompt(row=len(prompts), text=before + question + after, answer=answer))
        except Rejected as reason:
            rejected.append(f"{source_row.where}: {reason}")
    if not prompts and not rejected:
        raise DataError(f"{config.train} has no rows")
    if not prompts:
        raise rejection(config.train, len(rejected), rejected)
    return PromptDataset(
        source=config.train, prompts=tuple(prompts), digest=_digest(prompts), report=_report(prompts, rejected)
    )


def read_template(path: Path | None) -> tuple[str, str]:
    """Return what stands before and after the prompt. Raises ConfigError."""
    if path is None:
        return "", ""
    try:
        template = path.read_text(encoding="utf-8-sig").removesuffix("\n")
    except OSError as error:
        raise ConfigError(f"template {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"template {path} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        ) from error
    if (found := template.count(PLACEHOLDER)) != 1:
        raise ConfigError(f"template {path} holds {PLACEHOLDER} {found} times; expected exactly once")
    before, _, after = template.partition(PLACEHOLDER)
    return before, after


def _question_and_answer(row: SourceRow, config: DataConfig) -> tuple[str, str]:
    if row.problem is not None:
        raise Rejected(row.problem)
    for name in config.columns:
        if name not in row.values:
            raise Rejected(missing_field(name, row.values, config.naming))
    prompt_field, answer_field = config.prompt_column, config.fields["answer"]
    question = row.values[prompt_field]
    if not isinstance(question, str):
        raise Rejected(f'field "{prompt_field}" is {json_kind(question)}; expected a string')
    if isinstance(answer_field, str):
        return checked_text(question, prompt_field), answer_text(row.values[answer_field], answer_field)
    answer = {name: value for name in answer_field if (value := row.values[name]) is not None}
    return checked_text(question, prompt_field), answer_text(answer, ", ".join(answer_field))


def answer_text(answer: object, name: str) -> str:
    """Gold answers are text, so a number, a list or an object becomes the text JSON has for it. Raises Rejected."""
    if isinstance(answer, str):
        return checked_text(answer, name)
    if answer and isinstance(answer, list | dict):
        answer = cast(object, answer)
        try:
            return checked_text(json.dumps(answer, ensure_ascii=False, allow_nan=False), name)
        except (TypeError, ValueError) as error:
            raise Rejected(f'field "{name}" has no form in JSON: {error}') from None
    is_number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if not is_number:
        raise Rejected(f'field "{name}" is {json_kind(answer)}; expected a string, number, list or object')
    return json.dumps(answer)


def checked_text(text: str, name: str) -> str:
    """The text itself. Raises Rejected where it is empty or cannot be written as UTF-8."""
    if not text.strip():
        raise Rejected(f'field "{name}" is empty')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise Rejected(f'field "{name}" holds half a surrogate pair ({half}) at {error.start}; it is no text') from None
    return text


def _digest(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for prompt in prompts:
        for text in (prompt.text, prompt.answer):
            encoded = text.encode("utf-8")
            # With its length before it, text cannot move from one row or field to the next unnoticed.
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
    return digest.hexdigest()


def _report(prompts: list[Prompt], rejected: list[str]) -> DatasetReport:
    lengths = np.array([len(prompt.text) for prompt in prompts])
    p50, p95 = np.quantile(lengths, [0.5, 0.95], method="inverted_cdf")
    return DatasetReport(
        num_rows=len(prompts),
        num_duplicates=len(prompts) - len({prompt.text for prompt in prompts}),
        prompt_chars_p50=int(p50),
        prompt_chars_p95=int(p95),
        prompt_chars_max=int(lengths.max()),
        num_rejected=len(rejected),
        rejected=tuple(rejected[:MAX_REJECTIONS_SHOWN]),
    )


def rejection(source: str, num_rejected: int, rejected: Iterable[str]) -> DataError:
    """
    Args:
        rejected: where and why, of each row or of the first ones; ten are told.
    """
    shown = list(rejected)[:MAX_REJECTIONS_SHOWN]
    if num_rejected == 1:
        return DataError(shown[0])
    more = [f"and {num_rejected - len(shown)} more"] if num_rejected > len(shown) else []
    return DataError("\n  ".join([f"{source}: {num_rejected} rows cannot be used", *shown, *more]))
