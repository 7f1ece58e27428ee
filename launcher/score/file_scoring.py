"""Score a file of completions."""

import errno
import json
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from towline.launcher.preflight import nearest_folder
from towline.launcher.score.bar import bar
from towline.launcher.score.completion_lines import STDIN, Line, parse_fields, read_lines
from towline.launcher.score.options import ScoreOptions, exit_code, open_console, open_grader, say
from towline.launcher.score.report import Report
from towline.launcher.score.reward_file import Rewards, read_rewards
from towline.launcher.score.sample import Sample
from towline.launcher.score.score_json import FIELD, score_json
from towline.launcher.score.trial import candidates_of_lines, try_rewards
from towline.storage.dataset_files import shown
from towline.storage.errors import ConfigError, InputError, TowlineError
from towline.storage.publish import publish_first
from towline.storage.records import Score

Scored = Sequence[tuple[Line, Sequence[Score]]]


def score_file(source: str, options: ScoreOptions) -> int:
    rewards = _rewards(source, options)
    if options.output is not None:
        _refuse_unwritable(options.output)
    lines = read_lines(
        source, parse_fields(options.fields), compare=options.compare, needs_tokens=rewards.counts_tokens
    )
    name = "standard input" if source == STDIN else shown(Path(source))
    if options.dry_run:
        candidates, num = candidates_of_lines(lines)
        return try_rewards(candidates, rewards, options, num_completions=num, what=f"all completions of {name}")
    scored, code_hash = _score(lines, rewards, options)
    if options.output is not None:
        _write(options.output, scored, rewards.weights, code_hash)
    report = Report(rewards.weights)
    for line, scores in scored:
        for sample in _samples(line, scores):
            report.add(sample)
    console = open_console()
    say(console, f"{name}   {report.num_completions:,} completions of {len(lines):,} lines")
    say(console, rewards.lines(code_hash))
    report.show(console)
    if options.output is not None:
        say(console, f"written   {shown(options.output)}")
    return exit_code(console, report.num_failed, report.num_completions, rewards.scoring.max_failed)


def _rewards(source: str, options: ScoreOptions) -> Rewards:
    if options.rewards is None:
        raise ConfigError(f"{source} has no rewards of its own: --rewards FILE, with [[rewards]] tables.")
    rewards = read_rewards(options.rewards)
    rewards.refuse_reward_models()
    return rewards


def _score(lines: Sequence[Line], rewards: Rewards, options: ScoreOptions) -> tuple[Scored, str]:
    """Each line with the scores of its completions, and the fingerprint of the code that gave them."""
    num = sum(len(line.group.completions) for line in lines)
    with closing(open_grader(rewards, options)) as grader, bar("scoring", num) as progress:
        scores = iter(grader.score([line.group for line in lines], lambda done, _: progress(done)))
        return [(line, [next(scores) for _ in line.group.completions]) for line in lines], grader.code_hash


def _samples(line: Line, scores: Sequence[Score]) -> Iterator[Sample]:
    together = zip(line.group.completions, scores, line.earlier, strict=True)
    for number, (completion, score, earlier) in enumerate(together):
        yield Sample(
            where=line.place(number),
            prompt=line.group.prompt.row,
            completion=completion.text,
            gold=line.group.prompt.answer,
            score=score,
            earlier=earlier,
        )


def _refuse_unwritable(output: Path) -> None:
    """Before hours of scoring, not after them."""
    folder = nearest_folder(output.absolute().parent)
    if os.path.lexists(output):
        raise InputError(f"--output {output} exists; nothing is overwritten. Choose another name, or remove it.")
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--output {output}: {folder} is not a folder that you may write to.")


def _write(output: Path, scored: Scored, weights: Mapping[str, float], code_hash: str) -> None:
    """Every line as it was, with its scores; the file appears whole."""
    with _told(output), publish_first(output) as temporary, temporary.open("w", encoding="ascii") as file:
        for line, scores in scored:
            values = [score_json(score, weights, code_hash) for score in scores]
            file.write(json.dumps(line.values | {FIELD: values if line.is_list else values[0]}) + "\n")


@contextmanager
def _told(output: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        text = "it appeared meanwhile" if error.errno == errno.EEXIST else error.strerror
        raise TowlineError(f"--output {output} was not written: {text}.") from error
