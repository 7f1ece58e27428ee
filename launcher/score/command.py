"""`towline score`: rewards for the completions of a file or of a run, and what came of them."""

from collections.abc import Sequence
from pathlib import Path

from towline.jobs.load_experiment import load_experiment
from towline.launcher.find_run import find_run
from towline.launcher.rollout_run import with_rollouts
from towline.launcher.score.completion_lines import STDIN
from towline.launcher.score.file_scoring import score_file
from towline.launcher.score.options import ScoreOptions
from towline.launcher.score.reward_file import cluster_variables, read_rewards
from towline.launcher.score.run_scoring import score_run
from towline.launcher.score.trial import candidates_of_golds, try_rewards
from towline.rollout.grading import one_pool
from towline.storage.errors import ConfigError, InputError

FILE_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet")
"""A name that ends so means a file, also where there is none."""


def score(what: str | None, roots: Sequence[Path], options: ScoreOptions) -> int:
    """
    Args:
        what: a `.jsonl` file, `-`, or a run; None: the latest run, or, in a dry run with rewards of a file, the gold
            answers of the experiment that the file is.
        roots: folders in which runs are made.

    Returns:
        0; 1 where more completions than scoring.max_failed allows, or all, could not be scored, or a file of the run
        is damaged.
    """
    if options.make_scorer is not one_pool:
        _refuse_over_ranks(what, options)
    if what is not None and (what == STDIN or Path(what).is_file() or Path(what).suffix in FILE_SUFFIXES):
        return score_file(what, options)
    for name in ("fields", "compare", "output"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} is for a file of completions; a run's scores go into its ledger.")
    if what is None and options.dry_run and options.rewards is not None:
        return _try_before_a_run(options.rewards, options)
    return score_run(find_run(what, *roots), options)


def _refuse_over_ranks(what: str | None, options: ScoreOptions) -> None:
    if options.dry_run:
        raise ConfigError("--dry-run tries a few completions with one worker, in one process: leave out --mpi.")
    if what == STDIN:
        raise ConfigError(
            "--mpi does not take standard input, whose end not every mpirun passes on: write it to a .jsonl file first."
        )


def _try_before_a_run(path: Path, options: ScoreOptions) -> int:
    rewards = read_rewards(path)
    rewards.refuse_reward_models()
    if rewards.max_completion_tokens is None:
        raise InputError(
            f"{path} is no experiment file, and has no data to try its rewards on. Name a file of completions or a run."
        )
    experiment = with_rollouts(load_experiment(path, variables=cluster_variables()), path.name, "score")
    candidates, num = candidates_of_golds(experiment)
    return try_rewards(candidates, rewards, options, num_completions=num, what="the completions of a step")
