"""Runs to do harm to, and moments of them held still, so that a fault falls into one.

A moment is held by stopping a process: the scorer while the trainer waits for it (generating), a trainer rank until
the other hangs in a collective (training), the engine until the trainer waits for its acknowledgement (publishing).
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from integration.runs import ROOT, LiveRun

EXPERIMENT = ROOT / "tests" / "integration" / "faults" / "faults.toml"
STALL_S = 12.0
"""run.stall_s of the experiment."""
NUM_STEPS = 20
"""Its steps."""
HELD_BY = {"generating": "scorer.0", "training": "trainer.1", "publishing": "rollout.0"}


@contextmanager
def begun(root: Path, *overrides: str) -> Iterator[LiveRun]:
    """A run that has a checkpoint; nothing of it is left after the block."""
    run = LiveRun(root, *overrides, experiment=EXPERIMENT)
    try:
        run.wait_until(lambda: any((run.folder / "checkpoints").glob("*/complete.json")), "first checkpoint")
        yield run
    finally:
        run.kill()
        shutil.rmtree(root / "live", ignore_errors=True)


@contextmanager
def held(run: LiveRun, moment: str, *, for_good: bool = False) -> Iterator[None]:
    """Inside the block the run stands in this moment of a step. `for_good`: what holds it stays stopped after it."""
    store = run.store()
    phase = {"generating": "wait for rollouts", "training": "train", "publishing": "publish"}[moment]

    def stands() -> bool:
        """The trainer's first rank is in the phase, and stays there."""
        seen = [store.get("heartbeat/trainer.0")["phase"]]
        time.sleep(1.2)
        seen.append(store.get("heartbeat/trainer.0")["phase"])
        return seen == [phase, phase]

    for _ in range(10):
        with ExitStack() as until_moved:
            until_moved.enter_context(run.stopped(HELD_BY[moment]))
            if any(stands() for _ in range(3)):
                if for_good:
                    until_moved.pop_all()
                yield
                return
        # It stood in another phase, such as a checkpoint's. Long enough for the supervisor to see it move.
        time.sleep(1.5)
    raise AssertionError(f"no step stood still while {moment}:\n{run.text}")
