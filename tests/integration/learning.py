"""Do members of the GRPO family learn? Held-out accuracy before and after a few steps of a small task.

    python tests/integration/learning.py [--task sort] [--seeds 0 1 2] [--members GRPO RLOO]

A run starts six processes and needs 20 s for it, so a dozen of them take longer than they teach. Here two workers,
`learning_worker.py`, each load engine and trainer once and go through their half of the learnings.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launches import wait_for_all
from towline.rollout.evaluation.statistics import Interval, paired_difference

WORKER = Path(__file__).with_name("learning_worker.py")
NUM_WORKERS = 2
LIMIT_S = 1500.0
SEEDS = (0, 1, 2)
EXPERIMENTS = Path(__file__).parents[2] / "jobs" / "experiments"
TASKS = {
    "sort": (
        EXPERIMENTS / "tiny-grpo.toml",
        "steps=12",
        "trainer.learning_rate=2e-4",
        "trainer.warmup_steps=4",
        # Off policy after the first of four inner steps, so that the clips act.
        "trainer.inner_epochs=2",
        "trainer.minibatches=2",
    ),
    "code": (EXPERIMENTS / "tiny-code.toml", "steps=8"),
}
"""By name: the experiment, and the settings of all members on top of it."""
MEMBERS = {
    "GRPO": ("trainer.kl_beta=0.04",),
    "Dr. GRPO": ("trainer.scale=none", "trainer.normaliser=constant", "trainer.kl_beta=0"),
    "DAPO": (
        "trainer.clip_high=0.28",
        "trainer.kl_beta=0",
        "rollout.max_waves=3",
        'rewards=[{use="math_answer", weight=1.0}, {use="format", weight=0.1}, '
        '{use="overlong", weight=0.1, cache_tokens=2}]',
    ),
    "RLOO": (
        "trainer.baseline=leave_one_out",
        "trainer.scale=none",
        "trainer.kl_place=reward",
        "trainer.kl_beta=0.04",
    ),
}
"""By name: the settings of its row in docs/algorithms.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    member: str
    seed: int
    before: list[bool]
    """Whether each held-out prompt was answered rightly, in the order of the data."""
    after: list[bool]
    rows: list[dict[str, float]]
    """Metrics of each step."""
    cpu_s: float
    """Of the process, which has one thread for each of engine and trainer and uses them by turns."""

    @property
    def difference(self) -> Interval:
        return paired_difference(self.before, self.after)


def pooled_difference(learnings: Sequence[Learning]) -> Interval:
    """Over the prompts of all seeds."""
    return paired_difference(
        [right for one in learnings for right in one.before], [right for one in learnings for right in one.after]
    )


def learn(members: Sequence[str], seeds: Sequence[int], folder: Path, task: str = "sort") -> dict[str, list[Learning]]:
    """By member, in the order of the seeds.

    Args:
        folder: for what the workers leave.
    """
    chosen = [f"{member}:{seed}" for member, seed in product(members, seeds)]
    shares = [share for number in range(NUM_WORKERS) if (share := chosen[number::NUM_WORKERS])]
    # vLLM's part of torch is read when torch is, which the trainer imports first.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    launches: dict[Path, subprocess.Popen[bytes]] = {}
    for number, share in enumerate(shares):
        log = folder / f"worker-{number}.log"
        with log.open("w") as output:
            launches[log] = subprocess.Popen(
                [sys.executable, WORKER, folder, task, *share],
                stdout=output, stderr=output, cwd=folder, env=environment,
            )  # fmt: skip
    wait_for_all(launches, LIMIT_S)
    return {
        member: [Learning(**json.loads((folder / f"{member}:{seed}.json").read_text())) for seed in seeds]
        for member in members
    }


def table(learned: dict[str, list[Learning]]) -> str:
    lines = [f"{'member':10}{'seed':>5}{'before':>8}{'after':>8}   difference, 95 % interval      CPU s"]
    for member, learnings in learned.items():
        for one in learnings:
            lines.append(f"{member:10}{one.seed:>5}{_shown(one.before, one.after, one.difference)}{one.cpu_s:8.0f}")
        before, after = ([right for one in learnings for right in getattr(one, when)] for when in ("before", "after"))
        lines.append(f"{member:10}{'all':>5}{_shown(before, after, pooled_difference(learnings))}")
    return "\n".join(lines)


def _shown(before: list[bool], after: list[bool], difference: Interval) -> str:
    accuracies = "".join(f"{sum(right) / len(right):8.3f}" for right in (before, after))
    return f"{accuracies}   {difference.estimate:+.3f} ({difference.low:+.3f} to {difference.high:+.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, default="sort")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--members", nargs="+", choices=MEMBERS, default=list(MEMBERS), metavar="NAME")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="towline-learning-") as folder:
        print(table(learn(options.members, options.seeds, Path(folder), options.task)))


if __name__ == "__main__":
    main()
