"""What an attempt finds, clears away, and keeps before it goes on from a checkpoint."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from scored_groups import completion, score
from towline.jobs.processes import Attempt
from towline.jobs.resume import end_leftover_processes, prepare_resume
from towline.jobs.work import Workload, evaluation_work, training_work
from towline.storage.checkpoints import TrainingState, checkpoint_path, mark_complete
from towline.storage.ledger import ScoreSheet, scores_path, seal_scores, seal_shard
from towline.storage.metrics import append_jsonl
from towline.storage.records import RolloutGroup, ShardOrigin
from towline.storage.run_directory import RunDirectory, read_jsonl
from towline.storage.set_aside import list_aside


def keep_checkpoint(run: RunDirectory, step: int) -> None:
    state = TrainingState(step=step, wave=0, branch=0, version=step, stream_digest="", seed=0, data="", reference="",
                          kl_beta=0.04, ranks=1, zero_stage=2, precision="float32", optimizer={})  # fmt: skip
    checkpoint_path(run.checkpoints, step).mkdir(parents=True)
    mark_complete(run.checkpoints, step, state, {})


def seal_step(work: Workload, step: int, *, sampling_hash: str | None = None) -> list[Path]:
    for chunk, rows in work.chunks(step):
        groups = tuple(RolloutGroup(prompt=work.data.prompts[row], prompt_token_ids=[1], completions=(completion([2]),))
                       for row in rows)  # fmt: skip
        origin = ShardOrigin(chunk=chunk, branch=0, engine=0, attempt=0, weight_hashes={0: ""}, sampling={}, began=1.0,
                             ended=2.0, sampling_hash=sampling_hash or work.sampling_hash)  # fmt: skip
        digest = seal_shard(work.path(chunk), groups, origin)
        sheet = ScoreSheet(scores=tuple(score(1.0) for _ in rows), weights={"exact": 1.0}, code_hash="0",
                           shard_digest=digest, began=1.0, ended=2.0)  # fmt: skip
        seal_scores(work.path(chunk), sheet)
    return [work.path(chunk) for chunk, _ in work.chunks(step)]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = b""
    path.write_bytes(data)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    """Killed in step 3, with checkpoint 2, evaluations at 0, 2 and 3."""
    run.logs(0).mkdir(parents=True)
    run.logs(1).mkdir()
    for step in range(3):
        append_jsonl(run.metrics, {"step": step, "version": step + 1, "loss/policy": 0.5 * step})
    for version in (0, 2, 3):
        append_jsonl(run.evaluations, {"version": version, "accuracy": 0.1 * version})
    keep_checkpoint(run, 2)
    return run


def resume(run: RunDirectory, make_experiment, told: list[str], **tables) -> int | None:
    return prepare_resume(run, 1, make_experiment(**tables), told.append)


def test_rows_of_steps_that_are_trained_again_are_kept_elsewhere(run, make_experiment, told):
    assert resume(run, make_experiment, told) == 2
    assert [row["step"] for row in read_jsonl(run.metrics)] == [0, 1]
    assert read_jsonl(run.metrics)[1] == {"step": 1, "version": 2, "loss/policy": 0.5}
    assert [row["version"] for row in read_jsonl(run.evaluations)] == [0, 2]
    assert read_jsonl(run.logs(1) / "superseded.jsonl") == [
        {"file": "metrics.jsonl", "step": 2, "version": 3, "loss/policy": 1.0},
        {"file": "evaluations.jsonl", "version": 3, "accuracy": pytest.approx(0.3)},
    ]
    assert told == ["going on from checkpoint 2; steps trained again after it: 1"]


def test_a_checkpoint_that_was_cut_short_is_passed_over_and_what_that_costs_is_told(run, make_experiment, told):
    # case G4-18: killed while checkpoint 20 was written, and started again by Slurm
    run.metrics.write_text("".join(json.dumps({"step": step, "version": step + 1}) + "\n" for step in range(20)))
    keep_checkpoint(run, 10)
    half = checkpoint_path(run.checkpoints, 20)
    half.mkdir()
    (half / "weights").write_bytes(b"half of them")
    assert resume(run, make_experiment, told) == 10
    assert told == ["going on from checkpoint 10; steps trained again after it: 10"]
    assert [row["step"] for row in read_jsonl(run.metrics)] == [*range(10)]


def test_nothing_is_superseded_where_the_checkpoint_is_the_newest(run, make_experiment, told):
    keep_checkpoint(run, 3)
    before = run.metrics.read_bytes(), run.evaluations.read_bytes()
    assert resume(run, make_experiment, told) == 3
    assert (run.metrics.read_bytes(), run.evaluations.read_bytes()) == before
    assert not (run.logs(1) / "superseded.jsonl").exists()


def test_without_a_checkpoint_everything_is_trained_again_on_the_shards_that_are_there(run, make_experiment, told):
    (checkpoint_path(run.checkpoints, 2) / "complete.json").unlink()
    shards = seal_step(training_work(make_experiment(), run), 0)
    assert resume(run, make_experiment, told) is None
    assert read_jsonl(run.metrics) == []
    assert [row["version"] for row in read_jsonl(run.evaluations)] == [0]
    assert all(path.exists() for path in shards)
    assert told == ["no checkpoint was kept: training begins again with step 0, on the shards that are there"]


def test_a_first_attempt_has_nothing_to_clear_away(run, make_experiment, told):
    before = run.metrics.read_bytes()
    assert prepare_resume(run, 0, make_experiment(), told.append) is None
    assert (told, run.metrics.read_bytes()) == ([], before)


def test_damaged_shards_of_steps_to_come_are_set_aside_with_their_scores(run, make_experiment, told):
    work = training_work(make_experiment(), run)
    past, (first, second) = seal_step(work, 1), seal_step(work, 2)
    for path in (*past, first):
        damage(path)
    assert resume(run, make_experiment, told) == 2
    (entry,) = list_aside(run)
    assert entry.path == first.relative_to(run.root).as_posix()
    assert entry.attempt == 1
    assert not first.exists()
    assert not scores_path(first).exists()
    assert (run.root / entry.aside).exists()
    assert all(path.exists() for path in (*past, second, scores_path(second)))
    assert told[0] == f"{entry.path} is set aside: {entry.reason}"


def test_shards_that_would_be_sampled_otherwise_now_are_set_aside(run, make_experiment, told):
    shards = seal_step(training_work(make_experiment(), run), 2)
    assert resume(run, make_experiment, told, rollout={"temperature": 0.5}) == 2
    assert [entry.path for entry in list_aside(run)] == [path.relative_to(run.root).as_posix() for path in shards]
    assert all("sampled with other settings or data" in entry.reason for entry in list_aside(run))


def test_shards_of_evaluations_are_looked_at_too(run, make_experiment, told):
    work = evaluation_work(make_experiment(), run)
    assert work is not None
    (path,) = seal_step(work, 2)
    damage(path)
    resume(run, make_experiment, told)
    assert [entry.path for entry in list_aside(run)] == [path.relative_to(run.root).as_posix()]


@contextmanager
def sleeping(run_folder: str | None) -> Iterator[subprocess.Popen[bytes]]:
    environment = {name: value for name, value in os.environ.items() if name != "TOWLINE_RUN"}
    if run_folder is not None:
        environment["TOWLINE_RUN"] = run_folder
    with subprocess.Popen(["sleep", "600"], env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def test_processes_that_an_attempt_left_behind_are_ended_and_no_others(run, make_experiment, told):
    mine = str(run.root)
    with sleeping(mine) as one, sleeping(mine) as two, sleeping(f"{mine}-2") as other, sleeping(None) as unrelated:
        resume(run, make_experiment, told)
        assert not psutil.pid_exists(one.pid)
        assert not psutil.pid_exists(two.pid)
        assert (other.poll(), unrelated.poll()) == (None, None)
    assert told[0] == "2 processes that an earlier attempt left behind were ended"


def test_leftovers_are_found_from_whichever_folder_the_run_is_named(run, monkeypatch: pytest.MonkeyPatch):
    with sleeping(str(run.root)) as left:
        monkeypatch.chdir(run.root.parent)
        assert end_leftover_processes(RunDirectory(Path(run.root.name))) == 1
        assert not psutil.pid_exists(left.pid)


def test_every_process_of_a_run_carries_its_whole_path(run, make_experiment, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(run.root.parent)
    attempt = Attempt(run=RunDirectory(Path(run.root.name)), number=1, experiment=make_experiment(), resume_step=2)
    specs = attempt.processes("127.0.0.1:1", "gloo")
    assert [spec.name for spec in specs] == ["trainer", "rollout.0", "scorer.0"]
    assert {spec.environment["TOWLINE_RUN"] for spec in specs} == {str(run.root)}
    assert {spec.environment["TOWLINE_RESUME_STEP"] for spec in specs} == {"2"}


def test_a_process_does_not_end_itself(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TOWLINE_RUN", str(run.root))
    assert end_leftover_processes(run) == 0
    assert psutil.Process().is_running()


def test_a_line_that_a_killed_trainer_left_unfinished_is_no_row(run, make_experiment, told):
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": 3})[:-1])
    assert resume(run, make_experiment, told) == 2
    assert [row["step"] for row in read_jsonl(run.metrics)] == [0, 1]
