"""`towline score --dry-run`: each verdict on a few completions, and what all of them would take. Writes nothing."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from towline.jobs.experiment import RolloutExperiment
from towline.launcher.score.completion_lines import Line
from towline.launcher.score.options import ScoreOptions, open_console, open_grader, say
from towline.launcher.score.report import NONE, excerpt, seconds_text
from towline.launcher.score.rescoring import place, sealed_shards
from towline.launcher.score.reward_file import Rewards
from towline.launcher.score.sample import Sample
from towline.launcher.score.text_group import text_group
from towline.launcher.summary import duration
from towline.launcher.text import printable
from towline.rollout.rewards.boxed import last_boxed
from towline.storage.datasets import load_prompts
from towline.storage.errors import InputError
from towline.storage.ledger import read_shard
from towline.storage.records import RolloutGroup, Score, ScoreStatus
from towline.storage.run_directory import RunDirectory

T = TypeVar("T")
NUM_TRIED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    where: str
    group: RolloutGroup
    """Of one completion."""


def spread(items: Sequence[T], num: int = NUM_TRIED) -> list[T]:
    """Up to `num` of them, evenly over the whole, the first and the last included."""
    if len(items) <= num:
        return list(items)
    return [items[number * (len(items) - 1) // (num - 1)] for number in range(num)]


def candidates_of_lines(lines: Sequence[Line]) -> tuple[list[Candidate], int]:
    """What to try, and of how many completions that is."""
    places = [(line, number) for line in lines for number in range(len(line.group.completions))]
    chosen = [Candidate(where=line.place(number), group=_alone(line.group, number)) for line, number in spread(places)]
    return chosen, len(places)


def candidates_of_run(run: RunDirectory) -> tuple[list[Candidate], int]:
    """One completion of each of some shards; how many there are in all is estimated from these shards."""
    shards = sealed_shards(run)
    chosen: list[Candidate] = []
    num_seen = 0
    tried = spread(shards)
    for turn, path in enumerate(tried):
        shard = read_shard(path)
        places = [(group, number) for group in shard.groups for number in range(len(group.completions))]
        num_seen += len(places)
        # Another place in each shard, so that not every one is the first completion of a prompt.
        for group, number in places[turn % len(places) :][:1] if places else []:
            chosen.append(Candidate(where=place(shard, group.prompt.row, number), group=_alone(group, number)))
    return chosen, round(num_seen * len(shards) / len(tried))


def candidates_of_golds(experiment: RolloutExperiment) -> tuple[list[Candidate], int]:
    """Before a run there are no completions: its own gold answers as they are, their last line boxed, and nothing.

    The number of completions is that of a step.
    """
    data = load_prompts(experiment.data)
    chosen = [
        Candidate(
            where=f"{Path(data.source).name} row {prompt.row}, {name}",
            group=text_group(prompt.row, prompt.answer, [text]),
        )
        for prompt in spread(data.prompts)
        for name, text in _completions_of(prompt.answer)
    ]
    return chosen, experiment.rollout.prompts_per_step * experiment.rollout.group_size


def _completions_of(gold: str) -> Iterator[tuple[str, str]]:
    answer = gold.rpartition("####")[2].strip()
    yield "the gold answer itself", gold
    yield "the gold answer in a box", rf"\boxed{{{last_boxed(answer) or answer}}}"
    yield "nothing", ""


def try_rewards(
    candidates: Sequence[Candidate],
    rewards: Rewards,
    options: ScoreOptions,
    *,
    num_completions: int,
    what: str,
    max_completion_tokens: int | None = None,
) -> int:
    """Score them with one worker and print what came of each.

    Args:
        num_completions: that would be scored without --dry-run.
        what: these are, as in "all completions of answers.jsonl".
        max_completion_tokens: as in `open_grader`.
    """
    if not candidates:
        raise InputError(f"{what}: there are none.")
    console = open_console()
    grader = open_grader(rewards, options, max_completion_tokens=max_completion_tokens, num_workers=1)
    with closing(grader):
        # What a function imports when it is first called is no part of the pace.
        scores = grader.score([candidates[0].group])
        began = time.monotonic()
        scores += grader.score([candidate.group for candidate in candidates[1:]])
        pace_s = (time.monotonic() - began) / (len(candidates) - 1) if len(candidates) > 1 else scores[0].seconds
    for candidate, score in zip(candidates, scores, strict=True):
        for line in _verdict_lines(candidate, score):
            say(console, line)
    num_failed = sum(score.status is not ScoreStatus.OK for score in scores)
    whole_s = pace_s * num_completions / options.num_workers
    say(console, f"\ntried     {len(scores):,}, of which {num_failed:,} failed; nothing was written")
    say(console, f"pace      {seconds_text(pace_s)} a completion: {what}, {num_completions:,}, would take "
                 f"{f'about {duration(whole_s)}' if whole_s >= 1 else 'less than a second'} with {options.num_workers} "
                 f"worker{'' if options.num_workers == 1 else 's'}")  # fmt: skip
    return 1 if num_failed == len(scores) else 0


def _verdict_lines(candidate: Candidate, score: Score) -> Iterator[str]:
    group = candidate.group
    sample = Sample(where=candidate.where, prompt=0, completion=group.completions[0].text, gold=group.prompt.answer,
                    score=score, earlier=None)  # fmt: skip
    yield f"{candidate.where}   total {_value(score.total, score.status)}   {seconds_text(score.seconds)}"
    yield f"  {excerpt(sample)}"
    for name, value in score.parts.items():
        status, seconds = score.part_status[name], score.part_seconds[name]
        took = NONE if math.isnan(seconds) else seconds_text(seconds)
        yield f"  {name}   {_value(value, status)}   {status.name.lower()}   {took}"
    if score.detail:
        yield f"  {printable(score.detail)}"


def _value(value: float, status: ScoreStatus) -> str:
    return f"{value:.6g}" if status is ScoreStatus.OK else NONE


def _alone(group: RolloutGroup, number: int) -> RolloutGroup:
    return replace(group, completions=(group.completions[number],))
