"""What a user asks of `towline score`, and the workers that it comes to."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from towline.launcher.score.reward_file import Rewards
from towline.rollout.grading import Grader, MakeScorer, one_pool
from towline.rollout.rewards.token_penalty import TokenPenalty
from towline.storage.errors import ConfigError

MAX_DEFAULT_WORKERS = 4
"""A login node is shared by everybody."""
MIN_WIDTH = 120
"""Of a file, a pipe or a terminal that mpirun made, which have none of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    rewards: Path | None
    workers: int | None
    """None: one for each processor, up to MAX_DEFAULT_WORKERS."""
    limit_s: float | None
    """None: scoring.limit_s of the rewards."""
    dry_run: bool
    fields: str | None
    compare: str | None
    output: Path | None
    make_scorer: MakeScorer = one_pool
    """One pool, or those of all ranks."""

    @property
    def num_workers(self) -> int:
        return self.workers or min(MAX_DEFAULT_WORKERS, len(os.sched_getaffinity(0)))

    def limit_of(self, rewards: Rewards) -> float:
        return rewards.scoring.limit_s if self.limit_s is None else self.limit_s


def open_grader(
    rewards: Rewards, options: ScoreOptions, *, max_completion_tokens: int | None = None, num_workers: int | None = None
) -> Grader:
    """
    Args:
        max_completion_tokens: of what is scored; None: of the experiment that the rewards are part of.
        num_workers: default: as the options have it.

    Raises:
        ConfigError: a part counts tokens, and how many there may be is not known, or leaves it no room.
    """
    max_tokens = max_completion_tokens or rewards.max_completion_tokens
    _refuse_impossible_penalties(rewards, max_tokens)
    return Grader(
        rewards.tables,
        max_completion_tokens=max_tokens or 0,  # 0: nothing counts tokens
        num_workers=num_workers or options.num_workers,
        limit_s=options.limit_of(rewards),
        folder=Path.cwd(),
        memory_gib=rewards.scoring.memory_gib,
        make_scorer=options.make_scorer,
    )


def _refuse_impossible_penalties(rewards: Rewards, max_tokens: int | None) -> None:
    for table in (table for table in rewards.tables if table.counts_tokens):
        if max_tokens is None:
            raise ConfigError(
                f"{rewards.source}: {table.part_name} counts tokens and needs rollout.max_completion_tokens: give the "
                "whole experiment file as --rewards, or leave that part out."
            )
        penalty = TokenPenalty.of(table, max_tokens)
        if penalty is not None and not 0 <= penalty.free_tokens < max_tokens:
            raise ConfigError(
                f"{rewards.source}: {table.part_name} is for longer completions than rollout.max_completion_tokens "
                f"({max_tokens}) allows: lower its cache_tokens or target_tokens."
            )


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """`towline score … | head` is no failure; the command knows what to do."""
        raise BrokenPipeError


def open_console() -> Console:
    console = _Console(highlight=False)
    if not console.is_terminal or shutil.get_terminal_size((0, 0)).columns == 0:
        console.width = max(console.width, MIN_WIDTH)
    return console


def say(console: Console, line: str) -> None:
    console.print(line, soft_wrap=True, markup=False)


def exit_code(console: Console, num_failed: int, num_completions: int, max_failed: float) -> int:
    """1, and say why, where no completion or too few of them could be scored; else 0.

    Args:
        max_failed: scoring.max_failed of the rewards, here the share of all completions.
    """
    share = num_failed / num_completions if num_completions else 0.0
    if num_failed == num_completions > 0:
        say(console, "FAILED    no completion could be scored")
    elif share > max_failed:
        say(
            console,
            f"FAILED    {share:.2%} of the completions could not be scored, and scoring.max_failed allows "
            f"{100 * max_failed:g}%",
        )
    else:
        return 0
    return 1
