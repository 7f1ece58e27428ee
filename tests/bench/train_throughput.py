"""Training steps of SFT and DPO on GSM8K, tokens a second: Towline against a bare PyTorch loop and against TRL.

    python tests/bench/train_throughput.py [--check] [--by cpu] [--case NAME] [--model FOLDER] [--data FILE]

Every contestant is a process with two threads and takes the same optimiser steps on the same tokens in turn with its
peers, first a step that is not counted; the fastest counts. Tokens are those of prompts and completions, without
padding. Only training steps are timed: the table of DPO's reference is made before. `loss` is that of the first step
and of the last. Ratios are of wall time, or with `--by cpu` of CPU time, which other work on the machine spoils less.
--check exits 1 below the bars.

The bare loop pads: rows sorted by length, as many as the budget of a micro-batch holds, and the head at trained tokens
only. TRL packs for SFT, and pads for DPO, where it has nothing else.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import train_workload as workload

PEERS = Path(__file__).parent / "train_peers.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    objective: str
    precision: str
    bars: dict[str, float]
    """Peer → what Towline's tokens a second must be of the peer's."""


CASES = {
    "sft_float32": Case(objective="sft", precision="float32", bars={"bare": 0.85, "trl": 1.15}),
    "sft_bfloat16": Case(objective="sft", precision="bfloat16", bars={"bare": 0.85}),
    "dpo_float32": Case(objective="dpo", precision="float32", bars={"trl": 1.3}),
}


@dataclass(slots=True, kw_only=True)
class Contestant:
    name: str
    process: subprocess.Popen[str]
    log: Path
    steps: list[dict[str, float]] = field(default_factory=list)

    def take_step(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        self.steps.append(json.loads(self.wait_for("STEP").removeprefix("STEP ")))

    def wait_for(self, word: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line
        raise SystemExit(f"{self.name} failed:\n{self.log.read_text()[-4000:]}")

    def best(self, clock: str) -> float:
        """Seconds."""
        return min(step[clock] for step in self.steps[1:])


def start(name: str, case: Case, options: argparse.Namespace, folder: Path) -> Contestant:
    log = folder / f"{name}.log"
    arguments = [f"{name}_{case.objective}", str(options.model), str(options.data), str(options.repeats + 1)]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(PEERS), *arguments, case.precision],
            # Threads that wait without spinning: else those of a busy machine count as CPU time.
            env=os.environ | {"OMP_NUM_THREADS": str(workload.THREADS), "OMP_WAIT_POLICY": "passive"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
        )
    return Contestant(name=name, process=process, log=log)


def compare(case_name: str, options: argparse.Namespace) -> list[tuple[str, float, float]]:
    """Run a case, print its table; return name, ratio and bar of each peer."""
    case = CASES[case_name]
    began = time.monotonic()
    if case.objective == "sft":
        sequences = [example.tokens for example in workload.demonstrations(options.model, options.data)]
    else:
        sequences = workload.both(workload.preferences(options.model, options.data))
    tokens = workload.num_tokens(sequences)
    contestants: list[Contestant] = []
    with tempfile.TemporaryDirectory(prefix="towline-bench-") as folder:
        try:
            for name in ("towline", *case.bars):
                contestants.append(start(name, case, options, Path(folder)))
                contestants[-1].wait_for("READY")
            for _ in range(options.repeats + 1):
                for contestant in contestants:
                    contestant.take_step()
        finally:
            for contestant in contestants:
                contestant.process.kill()
                contestant.process.wait()
    print(
        f"{case_name}: {len(sequences)} sequences of {min(len(s.token_ids) for s in sequences)} to "
        f"{max(len(s.token_ids) for s in sequences)} tokens, {tokens} in all; load {os.getloadavg()[0]:.1f}, "
        f"measured in {time.monotonic() - began:.0f} s"
    )
    print(f"{'':12}{'s/step':>8}{'worst':>8}{'CPU s':>8}{'tokens/s':>10}{'tokens/CPU s':>14}{'GiB':>6}   loss")
    for contestant in contestants:
        wall, cpu = contestant.best("wall"), contestant.best("cpu")
        worst = max(step["wall"] for step in contestant.steps[1:])
        last = contestant.steps[-1]
        print(
            f"{contestant.name:12}{wall:8.2f}{worst:8.2f}{cpu:8.2f}{tokens / wall:10.0f}{tokens / cpu:14.0f}"
            f"{last['peak_gib']:6.1f}   {contestant.steps[0]['loss']:.4f} {last['loss']:.4f}",
            flush=True,
        )
    ours, *peers = contestants
    return [
        (f"{case_name}_vs_{peer.name}", peer.best(options.by) / ours.best(options.by), case.bars[peer.name])
        for peer in peers
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 below a bar")
    parser.add_argument("--model", type=lambda text: Path(text).resolve(), default=workload.MODEL)
    parser.add_argument("--data", type=Path, default=workload.GSM8K, help="JSON lines with question and answer")
    parser.add_argument("--repeats", type=int, default=2, help="counted steps of each, of which the fastest counts")
    parser.add_argument("--by", choices=["wall", "cpu"], default="wall", help="which time the ratios are of")
    parser.add_argument("--case", choices=[*CASES], help="one case alone")
    options = parser.parse_args()
    options.data = options.data.resolve()
    results = [result for name in ([options.case] if options.case else CASES) for result in compare(name, options)]
    for name, ratio, bar in results:
        print(f"{name} ratio {ratio:.2f} bar {bar:.2f}")
    return int(options.check and any(ratio < bar for _, ratio, bar in results))


if __name__ == "__main__":
    sys.exit(main())
