"""The `towline` command: which verbs there are and what each takes. A verb's module is imported when it is called."""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from towline.launcher.carry_out import carry_out

if TYPE_CHECKING:
    from towline.storage.run_directory import RunDirectory

DESCRIPTION = """Post-training of language models.

exit codes: 0 done, 1 failed, 2 bad input (nothing started), 3 stopped or failed with a checkpoint kept,
5 the run's node-hours are used up"""


def main(argv: Sequence[str] | None = None) -> None:
    sys.exit(command(sys.argv[1:] if argv is None else argv))


def command(argv: Sequence[str]) -> int:
    """Carry out one command line and return its exit code."""
    options = make_parser().parse_args(argv)
    return carry_out(lambda: options.carry_out(options))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="towline", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"towline {version('towline')}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    def verb(name: str, help: str, carry_out: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=help, description=help)
        added.set_defaults(carry_out=carry_out)
        return added

    _takes_experiment(verb("run", "train on this machine", _run))
    submit = verb("submit", "train on a Slurm cluster", _submit)
    _takes_experiment(submit)
    submit.add_argument("--cluster", metavar="PROFILE", help="cluster profile, name or file; default: $TOWLINE_CLUSTER")
    submit.add_argument("--dry-run", action="store_true", help="print the sbatch script, submit nothing")
    submit.add_argument("--smoke", action="store_true", help="both roles on one node of the profile's debug partition")
    resume = verb("resume", "go on with a run where it stopped", _resume)
    _takes_run(resume)
    _takes_overrides(resume, "change a value of the run, such as -o steps=800; may be repeated")
    check = verb("check", "say all that can be known before anything starts", _check)
    _takes_experiment(check)
    check.add_argument("--cluster", metavar="PROFILE", help="as `submit` with this profile would run it")
    verb("doctor", "what this machine has of what runs need", _doctor)
    status = verb("status", "how a run is doing", _status)
    _takes_run(status)
    status.add_argument("--follow", action="store_true", help="go on until the run has ended, and exit as it did")
    logs = verb("logs", "which logs a run has, and the end of one", _logs)
    _takes_run(logs)
    logs.add_argument(
        "process",
        nargs="?",
        metavar="PROCESS",
        help="such as trainer.0, rollout.1, supervisor, batch; default: list them",
    )
    logs.add_argument("--attempt", type=_count, metavar="N", help="default: the newest that has such a log")
    logs.add_argument("-n", dest="lines", type=_count, default=50, metavar="LINES", help="lines to show (default 50)")
    logs.add_argument("--follow", action="store_true", help="go on with what is added, in later attempts too")
    cancel = verb("cancel", "stop a run with a checkpoint, or take it out of the queue", _cancel)
    _takes_run(cancel)
    cancel.add_argument("--now", action="store_true", help="end it at once, without a new checkpoint")
    samples = verb("samples", "show completions of a run with their rewards", _samples)
    _takes_run(samples)
    samples.add_argument("--step", type=_count, help="step to show, from 0; default: the latest that is scored")
    samples.add_argument("--num", type=_count, default=8, help="completions to show (default 8)")
    samples.add_argument("--failed", action="store_true", help="only completions whose grading failed")
    samples.add_argument("--tokens", action="store_true", help="each token with its log-prob and policy version")
    _takes_scoring(verb("score", "reward the completions of a file, or of a run again, and compare", _score))
    ledger = verb("ledger", "what a run has recorded, checked file by file, and what was set aside and why", _ledger)
    _takes_run(ledger)
    replay = verb("replay", "train again from the recorded rollouts and compare the losses", _replay)
    _takes_run(replay)
    replay.add_argument("--step", type=_count, required=True, help="last step to train again, from 0")
    return parser


def _takes_experiment(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("file", type=Path, metavar="FILE", help="experiment (TOML)")
    _takes_overrides(verb, "replace a value of the file, such as -o trainer.learning_rate=1e-6; may be repeated")


def _takes_scoring(score: argparse.ArgumentParser) -> None:
    score.add_argument(
        "what", nargs="?", metavar="FILE|RUN",
        help="completions (.jsonl, or - for standard input), or a run's name, folder or Slurm job id; default: the "
        "latest run",
    )  # fmt: skip
    score.add_argument("--rewards", type=Path, metavar="TOML",
                       help="[[rewards]] tables, or a whole experiment; default: those of the run")  # fmt: skip
    score.add_argument("--dry-run", action="store_true",
                       help="try the rewards on a few completions, write nothing; without FILE|RUN: on gold answers of "
                       "the experiment's own data")  # fmt: skip
    score.add_argument("--workers", type=_positive, metavar="N",
                       help="processes that score, with --mpi of each rank (default: up to 4)")  # fmt: skip
    score.add_argument("--mpi", action="store_true",
                       help="share the work among all ranks of mpirun, or of srun --mpi=pmix")  # fmt: skip
    score.add_argument("--limit-s", type=_seconds, metavar="S", help="for one completion (default: scoring.limit_s)")
    score.add_argument("--fields", metavar="completion=FIELD,answer=FIELD",
                       help="which field of a line is what (default: the usual names)")  # fmt: skip
    score.add_argument("--compare", metavar="FIELD",
                       help="earlier scores of the file (default: towline_score, if it is there)")  # fmt: skip
    score.add_argument("--output", type=Path, metavar="JSONL", help="the lines of the file with their scores")
    _takes_root(score)


def _takes_overrides(verb: argparse.ArgumentParser, help: str) -> None:
    verb.add_argument("-o", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=help)


def _takes_run(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "run", nargs="?", metavar="RUN", help="a run's name, folder or Slurm job id; default: the latest run"
    )
    _takes_root(verb)


def _takes_root(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--root", type=Path, help="folder in which runs are made (default ./runs, and that of $TOWLINE_CLUSTER)"
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def _roots(options: argparse.Namespace) -> "tuple[Path, ...]":
    from towline.launcher.find_run import default_roots

    return default_roots() if options.root is None else (options.root,)


def _found(options: argparse.Namespace) -> "RunDirectory":
    from towline.launcher.find_run import find_run

    return find_run(options.run, *_roots(options))


def _run(options: argparse.Namespace) -> int:
    from towline.launcher.run import run_experiment

    return run_experiment(options.file, tuple(options.overrides))


def _submit(options: argparse.Namespace) -> int:
    from towline.launcher.submit import submit_from_command

    return submit_from_command(
        options.file, options.cluster, tuple(options.overrides), smoke=options.smoke, dry_run=options.dry_run
    )


def _resume(options: argparse.Namespace) -> int:
    from towline.launcher.resume import resume_run

    return resume_run(_found(options), tuple(options.overrides))


def _check(options: argparse.Namespace) -> int:
    from towline.launcher.check import check_experiment

    return check_experiment(options.file, tuple(options.overrides), options.cluster)


def _doctor(options: argparse.Namespace) -> int:
    from towline.launcher.doctor import print_doctor

    return print_doctor()


def _status(options: argparse.Namespace) -> int:
    run = _found(options)
    if options.follow:
        from rich.console import Console

        from towline.launcher.follow import follow_status

        return follow_status(run, Console(highlight=False))
    from towline.launcher.status import print_status

    return print_status(run)


def _logs(options: argparse.Namespace) -> int:
    from towline.launcher.logs import show_logs

    return show_logs(
        _found(options), options.process, attempt=options.attempt, follow=options.follow, num_lines=options.lines
    )


def _cancel(options: argparse.Namespace) -> int:
    from towline.launcher.cancel import cancel_run

    return cancel_run(_found(options), now=options.now)


def _samples(options: argparse.Namespace) -> int:
    from towline.launcher.rollout_run import rollout_experiment
    from towline.launcher.samples import print_samples

    run = _found(options)
    rollout_experiment(run, "samples")
    return print_samples(
        run,
        step=options.step,
        num=options.num,
        only_failed=options.failed,
        with_tokens=options.tokens,
    )


def _score(options: argparse.Namespace) -> int:
    from towline.launcher.score.command import score
    from towline.launcher.score.options import ScoreOptions
    from towline.launcher.score.ranks import alone, over_ranks

    spread = over_ranks if options.mpi else alone
    return spread(
        lambda make_scorer: score(
            options.what,
            _roots(options),
            ScoreOptions(
                rewards=options.rewards,
                workers=options.workers,
                limit_s=options.limit_s,
                dry_run=options.dry_run,
                fields=options.fields,
                compare=options.compare,
                output=options.output,
                make_scorer=make_scorer,
            ),
        )
    )


def _ledger(options: argparse.Namespace) -> int:
    from towline.launcher.ledger import print_ledger

    return print_ledger(_found(options))


def _replay(options: argparse.Namespace) -> int:
    from towline.launcher.replay import replay_run

    return replay_run(_found(options), options.step)


if __name__ == "__main__":
    main()
