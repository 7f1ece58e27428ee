"""Score a run's rollouts again, and say where the new scores differ from those that were trained on."""

from contextlib import closing
from pathlib import Path

from towline.launcher.rollout_run import rollout_experiment
from towline.launcher.score.bar import bar
from towline.launcher.score.options import ScoreOptions, exit_code, open_console, open_grader, say
from towline.launcher.score.report import Report
from towline.launcher.score.rescoring import Rescoring, scoring_name, sealed_shards
from towline.launcher.score.reward_file import Rewards, read_rewards, rewards_of
from towline.launcher.score.trial import candidates_of_run, try_rewards
from towline.storage.errors import ConfigError
from towline.storage.reward_folder import tokenizer_problem
from towline.storage.run_directory import RunDirectory


def score_run(run: RunDirectory, options: ScoreOptions) -> int:
    experiment = rollout_experiment(run, "score")
    limit = experiment.rollout.max_completion_tokens
    rewards = read_rewards(options.rewards) if options.rewards else rewards_of(experiment)
    _refuse_other_tokens(rewards, experiment.policy.folder)
    if options.dry_run:
        candidates, num = candidates_of_run(run)
        what = f"all completions of {run.root.name}"
        return try_rewards(candidates, rewards, options, num_completions=num, what=what, max_completion_tokens=limit)
    report = Report(rewards.weights)
    num_shards = len(sealed_shards(run))
    with closing(open_grader(rewards, options, max_completion_tokens=limit)) as grader:
        name = scoring_name(grader.code_hash, rewards.weights, options.limit_of(rewards), rewards.scoring.memory_gib)
        rescoring = Rescoring(run, grader, name)
        with bar("scoring shards", num_shards) as progress:
            for sample in rescoring.samples(progress):
                report.add(sample)
    console = open_console()
    kept = f", {rescoring.num_kept:,} were before" if rescoring.num_kept else ""
    again = f"{rescoring.num_scored:,} shards scored again{kept}"
    say(console, f"{run.root.name}   {again}   {report.num_completions:,} completions")
    say(console, rewards.lines(grader.code_hash))
    report.show(console)
    say(console, f"written   rollouts/*/*/chunk-*.scores-{name}.h5; the scores that were trained on are as they were")
    for damage in rescoring.damage:
        say(console, f"DAMAGED   {damage}")
    failed = exit_code(console, report.num_failed, report.num_completions, rewards.scoring.max_failed)
    return 1 if rescoring.damage else failed


def _refuse_other_tokens(rewards: Rewards, policy: Path) -> None:
    """
    Raises:
        ConfigError: a reward model reads other token ids than the policy wrote.
    """
    for table in rewards.tables:
        if table.model is not None and (problem := tokenizer_problem(table.model, policy)) is not None:
            raise ConfigError(f"{rewards.source}: {table.part_name}: {problem}")
