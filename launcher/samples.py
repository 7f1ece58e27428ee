"""`towline samples`: what the policy wrote, how each part of the reward judged it, and how sure it was."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from towline.launcher.text import printable
from towline.storage.errors import InputError
from towline.storage.ledger import ScoreSheet, Shard, read_scored_shard, scores_path, sealed_chunks, sealed_steps
from towline.storage.records import Completion, RolloutGroup, Score, ScoreStatus
from towline.storage.run_directory import RunDirectory


def print_samples(run: RunDirectory, *, step: int | None, num: int, only_failed: bool, with_tokens: bool) -> int:
    """Show up to `num` completions of a step, a prompt with its whole group before the next."""
    step = _latest_step(run) if step is None else step
    paths = _scored_chunks(run, step)
    if not paths:
        raise InputError(f"{run.root.name} has no scored rollouts of step {step}. There: {_steps_text(run)}.")
    print(f"{run.root.name}  step {step}")
    shown = 0
    for path in paths:
        for block in _blocks(*read_scored_shard(path), only_failed=only_failed, with_tokens=with_tokens):
            if shown == num:
                return 0
            print(block)
            shown += not block.startswith("\n")
    if shown == 0:
        print("no completion's grading failed" if only_failed else "no completions")
    return 0


def _latest_step(run: RunDirectory) -> int:
    scored = [step for step in sealed_steps(run.rollouts) if _scored_chunks(run, step)]
    if not scored:
        raise InputError(f"{run.root.name} has no scored rollouts yet.")
    return scored[-1]


def _scored_chunks(run: RunDirectory, step: int) -> list[Path]:
    return [path for path in sealed_chunks(run.rollouts, step) if scores_path(path).is_file()]


def _steps_text(run: RunDirectory) -> str:
    steps = sealed_steps(run.rollouts)
    return f"steps {steps[0]} to {steps[-1]}" if steps else "none yet"


def _blocks(shard: Shard, sheet: ScoreSheet, *, only_failed: bool, with_tokens: bool) -> Iterator[str]:
    """A prompt's heading, which begins with an empty line, then its completions."""
    scores = iter(sheet.scores)
    for group in shard.groups:
        members = [(completion, next(scores)) for completion in group.completions]
        wanted = [pair for pair in members if not only_failed or pair[1].status is not ScoreStatus.OK]
        if wanted:
            yield _heading(group, shard.origin.chunk.wave)
        for completion, score in wanted:
            yield _completion_text(completion, score, with_tokens=with_tokens)


def _heading(group: RolloutGroup, wave: int) -> str:
    return (
        f"\nprompt  row {group.prompt.row}{f' of wave {wave}' if wave else ''}, {len(group.prompt_token_ids)} tokens, "
        f"answer {printable(group.prompt.answer)}\n{_indented(group.prompt.text, '  | ')}"
    )


def _completion_text(completion: Completion, score: Score, *, with_tokens: bool) -> str:
    parts = "  ".join(_part_text(score, name) for name in score.parts)
    lines = [
        f"  reward {score.total:.3g}   {parts}",
        f"  {len(completion.token_ids)} tokens, {completion.finish_reason.name.lower()}   {_logprobs_text(completion)}",
        _indented(completion.text, "    > "),
    ]
    if score.status is not ScoreStatus.OK:
        lines.insert(1, f"  grading {score.status.name}: {printable(score.detail)}")
    if with_tokens:
        lines.append(_token_table(completion))
    return "\n".join(lines)


def _part_text(score: Score, name: str) -> str:
    status = score.part_status[name]
    return f"{name} {f'{score.parts[name]:.3g}' if status is ScoreStatus.OK else status.name}"


def _logprobs_text(completion: Completion) -> str:
    if len(completion.logprobs) == 0:
        return "no tokens"
    return f"log-prob mean {np.mean(completion.logprobs):.3f}, min {np.min(completion.logprobs):.3f}"


def _token_table(completion: Completion) -> str:
    rows = zip(completion.token_ids, completion.logprobs, completion.versions, strict=True)
    lines = [f"    {position:>5}  {token:>7}  {logprob:>9.4f}  v{version}"
             for position, (token, logprob, version) in enumerate(rows)]  # fmt: skip
    return "\n".join(["    place    token   log-prob  version", *lines])


def _indented(text: str, margin: str) -> str:
    return "\n".join(f"{margin}{printable(line)}" for line in text.split("\n"))
