"""One GRPO step of SmolLM2-135M: Towline against TRL and against the floor, one after the other on this machine.

    python tests/bench/grpo_step.py [--check] [--steps N] [--case short|200]

With prompts of about 38 tokens, and of about 206: groups of 8 completions of at most 64. Compares
prompt-and-completion tokens per second, since each contestant samples completions of its own. --check exits 1 below the
bars.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil

from bench import workload
from towline.storage.ledger import read_shard, sealed_chunks
from towline.storage.run_directory import read_jsonl

HERE = Path(__file__).parent
BARS = {
    "short": {"grpo_step_vs_trl": 1.3, "grpo_step_vs_floor": 1 / 1.2},
    "200": {"grpo_step_200_vs_trl": 2.0, "grpo_step_200_vs_floor": 1 / 1.2},
}

EXPERIMENT = """
objective = "grpo"
steps = {steps}
[policy]
model = "{model}"
[data]
train = "{data}"
[rollout]
prompts_per_step = {prompts}
group_size = {group}
max_completion_tokens = {tokens}
precision = "float32"
[[rewards]]
use = "{reward}:contains_answer"
weight = 1.0
[trainer]
learning_rate = {learning_rate}
kl_beta = 0.0
precision = "float32"
zero_stage = 0
checkpoint_every = 1000
[local]
trainer_threads = {threads}
engine_threads = {threads}
"""


def run_contestant(script: str, model: Path, steps: int, folder: Path, case: str) -> dict:
    command = [sys.executable, str(HERE / script), str(model), str(steps), case]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not results:
        raise SystemExit(f"{script} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads(results[-1].removeprefix("RESULT "))


def run_towline(model: Path, steps: int, folder: Path, case: str) -> dict:
    experiment = folder / "bench.toml"
    experiment.write_text(
        EXPERIMENT.format(
            steps=steps,
            model=model,
            data=workload.write_data(folder, case),
            prompts=workload.PROMPTS_PER_STEP,
            group=workload.GROUP_SIZE,
            tokens=workload.MAX_COMPLETION_TOKENS,
            reward=HERE / "workload.py",
            learning_rate=workload.LEARNING_RATE,
            threads=workload.THREADS,
        )
    )
    command = [sys.executable, "-m", "towline.launcher.cli", "run", str(experiment)]
    peaks = _PeakMemory()
    done = subprocess.run(
        [*command, "-o", f"run.root={folder}", "-o", "run.name=towline"], capture_output=True, text=True, cwd=folder
    )
    if done.returncode:
        raise SystemExit(f"towline failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    run = folder / "towline"
    rows = read_jsonl(run / "metrics.jsonl")
    seconds = [row["seconds/step"] for row in rows]
    tokens = [
        sum(
            len(group.prompt_token_ids) + len(completion.token_ids)
            for path in sealed_chunks(run / "rollouts", row["step"])
            for group in read_shard(path).groups
            for completion in group.completions
        )
        for row in rows
    ]
    phases = {
        name: sum(row[f"seconds/{name}"] for row in rows[1:]) / len(rows[1:])
        for name in ("generate", "score", "train", "sync")
    }
    return {
        "seconds": sum(seconds[1:]) / len(seconds[1:]),
        "tokens_per_s": sum(tokens[1:]) / sum(seconds[1:]),
        "peak_gib": peaks.stop(),
        "phases": phases,
    }


class _PeakMemory:
    """Largest resident memory of each role while it runs."""

    def __init__(self) -> None:
        self._peaks: dict[str, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        self._is_over.set()
        self._thread.join()
        return self._peaks

    def _watch(self) -> None:
        while not self._is_over.wait(0.5):
            for process in psutil.process_iter(["cmdline", "memory_info"]):
                command = process.info["cmdline"] or []
                role = next(
                    (word.removeprefix("towline.jobs.") for word in command if word.startswith("towline.jobs.")), None
                )
                if role is not None and process.info["memory_info"]:
                    gib = process.info["memory_info"].rss / 2**30
                    self._peaks[role] = max(self._peaks.get(role, 0.0), gib)


def compare(case: str, steps: int) -> bool:
    """Run the three contestants, print what they did; return whether every ratio reaches its bar."""
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as name:
        folder = Path(name)
        model = workload.float32_copy(folder)
        began = time.monotonic()
        results = {
            "towline": run_towline(model, steps, folder, case),
            "floor": run_contestant("floor.py", model, steps, folder, case),
            "trl": run_contestant("trl_peer.py", model, steps, folder, case),
        }
    print(f"{case + ' prompts':14}{'s/step':>9}{'tokens/s':>10}   peak memory")
    for contestant, result in results.items():
        memory = ", ".join(f"{role} {gib:.1f} GiB" for role, gib in sorted(result["peak_gib"].items()))
        print(f"{contestant:14}{result['seconds']:9.1f}{result['tokens_per_s']:10.0f}   {memory}")
    print("phases        ", ", ".join(f"{phase} {s:.1f} s" for phase, s in results["towline"]["phases"].items()))
    print(f"measured in {time.monotonic() - began:.0f} s")
    speed = {contestant: result["tokens_per_s"] for contestant, result in results.items()}
    reached: list[bool] = []
    for name, bar in BARS[case].items():
        ratio = speed["towline"] / speed[name.rpartition("_")[2]]
        print(f"{name} ratio {ratio:.2f} bar {bar:.2f}", flush=True)
        reached.append(ratio >= bar)
    return all(reached)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 below a bar")
    parser.add_argument("--steps", type=int, default=4, help="steps each; the first is left out")
    parser.add_argument("--case", choices=[*BARS], help="one case alone")
    options = parser.parse_args()
    reached = [compare(case, options.steps) for case in ([options.case] if options.case else BARS)]
    return int(options.check and not all(reached))


if __name__ == "__main__":
    sys.exit(main())
