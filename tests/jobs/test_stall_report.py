"""What is on disk after a run stood still: who, where each process was, and what waited."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from towline.jobs import stall_report
from towline.jobs.processes import Attempt
from towline.jobs.stall_report import ask_for_stacks, write_stall_report
from towline.jobs.standstill import Standstill
from towline.storage.ledger import ScoreSheet, seal_scores, seal_shard
from towline.storage.records import ChunkId, ShardOrigin

DUMP = """\
some line of the trainer
Current thread 0x00007f01 (most recent call first):
  File "/site-packages/old.py", line 1 in old
Thread 0x00007f02 (most recent call first):
  File "/lib/threading.py", line 327 in wait

Current thread 0x00007f01 (most recent call first):
  File "/site-packages/torch/distributed/distributed_c10d.py", line 2812 in all_reduce
  File "/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/towline/trainer/deepspeed_engine.py", line 70 in step
"""
CULPRIT = Standstill(process="trainer.1", phase="train", stood_s=61.0, limit_s=60.0, is_silent=True)


def beat(pid: int, phase: str, host: str | None = None) -> dict[str, object]:
    return {"phase": phase, "phase_s": 61.5, "pid": pid, "host": host or socket.gethostname()}


@pytest.fixture
def attempt(run, make_experiment) -> Attempt:
    run.logs(0).mkdir(parents=True)
    return Attempt(run=run, number=0, experiment=make_experiment())


def written(attempt: Attempt, beats: dict[str, dict[str, object]], asked: dict[str, int]) -> str:
    path = attempt.run.logs(0) / "stall.log"
    write_stall_report(path, CULPRIT, beats, asked, attempt)
    return path.read_text()


def test_the_culprit_comes_first_and_everybody_s_phase_follows(attempt: Attempt):
    lines = written(attempt, {"trainer.1": beat(11, "train"), "rollout.0": beat(12, "generate", "node-7")}, {})
    first, _, trainer, engine, *_ = lines.splitlines()
    assert first.endswith(f"trainer.1 {CULPRIT}")
    assert trainer == f"trainer.1    train since 61.5 s   pid 11 on {socket.gethostname()}"
    assert engine == "rollout.0    generate since 61.5 s   pid 12 on node-7"


def test_the_newest_stack_is_shown_with_the_collective_it_hangs_in(attempt: Attempt):
    attempt.run.log(0, "trainer.0").write_text(DUMP)
    text = written(attempt, {"trainer.0": beat(10, "train")}, {"trainer.0": 0})
    assert "pid 10 on " in text
    assert "   in collective all_reduce" in text
    shown = text[text.index("stack of trainer.0 (innermost first)") :].splitlines()
    assert shown[1:4] == DUMP.splitlines()[-3:]
    assert "old.py" not in text


def test_the_stack_of_an_earlier_standstill_is_not_taken_for_an_answer(attempt: Attempt):
    attempt.run.log(0, "trainer.0").write_text(DUMP)
    text = written(attempt, {"trainer.0": beat(10, "train")}, {"trainer.0": len(DUMP)})
    assert "stack of trainer.0 (innermost first)\n  none: it does not answer signals\n" in text
    assert "in collective" not in text


def test_a_process_that_answers_no_signal_says_so(attempt: Attempt):
    text = written(attempt, {"trainer.1": beat(11, "train")}, {"trainer.1": 0})
    assert "stack of trainer.1 (innermost first)\n  none: it does not answer signals\n" in text
    assert "in collective" not in text


def test_what_was_sealed_and_scored_of_the_newest_step_is_counted(attempt: Attempt):
    for step, numbers in ((0, (0, 1, 2)), (1, (0, 1))):
        for number in numbers:
            chunk = ChunkId(step=step, wave=0, chunk=number)
            origin = ShardOrigin(chunk=chunk, branch=0, engine=0, attempt=0, weight_hashes={}, sampling={}, began=1.0,
                                 ended=1.0)  # fmt: skip
            path = attempt.run.chunk(chunk)
            digest = seal_shard(path, (), origin)
            if number == 0:
                sheet = ScoreSheet(
                    scores=(), weights={"a": 1.0}, code_hash="", shard_digest=digest, began=1.0, ended=1.0
                )
                seal_scores(path, sheet)
    text = written(attempt, {}, {})
    assert "rollouts: step 1 has 2 sealed chunks, 1 of them scored" in text
    assert "step 0 has" not in text
    assert "held_out" not in text


def test_a_second_standstill_is_added_to_the_first(attempt: Attempt):
    written(attempt, {}, {})
    assert written(attempt, {}, {}).count("trainer.1 does not answer at all") == 2


def test_living_processes_are_asked_directly_or_through_their_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(stall_report, "_STACKS_WITHIN_S", 0.0)
    sent: list[tuple[int, int]] = []

    def send(pid: int, number: int) -> None:
        if pid == 20:
            raise ProcessLookupError
        sent.append((pid, number))

    monkeypatch.setattr(os, "kill", send)
    beats = {"trainer.0": beat(10, "train"), "rollout.0": beat(20, "generate"), "rollout.1": beat(30, "x", "node-7")}
    (tmp_path / "trainer.0").write_text("12 bytes. ..")
    elsewhere: list[int] = []
    asked = ask_for_stacks(beats, lambda name: tmp_path / name, elsewhere.append)
    assert asked == {"trainer.0": 12, "rollout.1": 0}
    assert sent == [(10, signal.SIGUSR1)]
    assert elsewhere == [signal.SIGUSR1]


def test_a_process_that_is_stopped_does_not_hold_up_the_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(stall_report, "_STACKS_WITHIN_S", 0.0)
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            process.send_signal(signal.SIGSTOP)
            asked = ask_for_stacks({"rollout.0": beat(process.pid, "generate")}, lambda name: tmp_path / name)
            assert asked == {"rollout.0": 0}
        finally:
            process.kill()
