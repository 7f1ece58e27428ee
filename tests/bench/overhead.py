"""What a step costs besides generating, scoring, training and moving weights: SmolLM2-135M, two ranks, one engine.

    python tests/bench/overhead.py [--check] [--steps N]

Runs the demonstration's experiment and takes the time from one row of metrics to the next as a step, so that
everything counts that happens in between. Other is what no part accounts for; it is below zero where parts overlap, as
when engines begin to generate while the trainer still ends its publication. --check exits 1 above the bar.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from towline.storage.run_directory import read_jsonl

ROOT = Path(__file__).parents[2]
EXPERIMENT = ROOT / "jobs" / "experiments" / "last-number.toml"
BAR = 0.03


def run_with_times(folder: Path, steps: int) -> tuple[list[dict], list[float]]:
    """Rows of metrics, and when each appeared, s."""
    command = [sys.executable, "-m", "towline.launcher.cli", "run", str(EXPERIMENT)]
    options = [f"steps={steps}", f"run.root={folder}", "run.name=overhead", f"trainer.checkpoint_every={steps}"]
    metrics, seen = folder / "overhead" / "metrics.jsonl", list[float]()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.01):
            while len(seen) < len(read_jsonl(metrics)):
                seen.append(time.monotonic())

    watcher = threading.Thread(target=watch)
    watcher.start()
    done = subprocess.run(
        [*command, *(part for option in options for part in ("-o", option))], capture_output=True, text=True, cwd=folder
    )
    is_over.set()
    watcher.join()
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return read_jsonl(metrics), seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 above the bar")
    parser.add_argument("--steps", type=int, default=5, help="steps; the first is left out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as name:
        rows, seen = run_with_times(Path(name), options.steps)
    steps = np.diff(seen)
    rows = rows[1:]
    parts = {
        "generate": [row["seconds/generate"] for row in rows],
        "score": [row["seconds/score"] for row in rows],
        "train": [row["seconds/train"] for row in rows],
        "transfer": [row["seconds/sync"] - row["seconds/probe"] for row in rows],
        "probe": [row["seconds/probe"] for row in rows],
    }
    parts["other"] = list(steps - sum(np.array(values) for values in parts.values()))
    print(f"{'':10}{'s/step':>8}{'share':>8}")
    for part, values in {"step": list(steps), **parts}.items():
        print(f"{part:10}{np.mean(values):8.2f}{sum(values) / steps.sum():8.1%}")
    waits = [row["seconds/wait"] - row["seconds/generate"] - row["seconds/score"] for row in rows]
    print(f"of other, {np.mean(waits):.2f} s from probe to first request and from last score to training")
    overhead = (sum(parts["other"]) + sum(parts["probe"])) / steps.sum()
    print(f"without the probe {sum(parts['other']) / steps.sum():.1%}")
    print(f"overhead ratio {overhead:.3f} bar {BAR:.2f}")
    return 1 if options.check and overhead > BAR else 0


if __name__ == "__main__":
    sys.exit(main())
