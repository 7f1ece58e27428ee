"""Every process must come to the same chunks of work by itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from towline.jobs.experiment import GrpoExperiment
from towline.jobs.work import evaluation_work, training_work
from towline.storage.errors import ConfigError
from towline.storage.records import ChunkId
from towline.storage.run_directory import RunDirectory

NUM_ROWS = 11
NUM_HELD_OUT = 70


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def write_rows(path: Path, num_rows: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"p{row}", "answer": f"a{row}"}) + "\n" for row in range(num_rows)))
    return path


def experiment(folder: Path, *, evaluation: bool = True, **rollout: object) -> GrpoExperiment:
    held_out = {"data": {"train": str(write_rows(folder / "held_out.jsonl", NUM_HELD_OUT)), "chat": False}}
    fields = {
        "objective": "grpo",
        "seed": 5,
        "steps": 20,
        "policy": {"model": str(folder)},
        "data": {"train": str(write_rows(folder / "train.jsonl", NUM_ROWS))},
        "rollout": {"prompts_per_step": 5, "max_completion_tokens": 4, "group_size": 3, "temperature": 0.5} | rollout,
        "rewards": [{"use": "exact_match", "weight": 2.0}, {"use": "format", "weight": 0.5}],
        "trainer": {"learning_rate": 1e-4},
        "evaluation": held_out | {"temperature": 0.25} if evaluation else None,
    }
    return GrpoExperiment.model_validate_json(json.dumps(fields))


def test_a_step_s_chunks_are_its_scheduled_rows_in_order(tmp_path: Path, run: RunDirectory) -> None:
    work = training_work(experiment(tmp_path, chunk_prompts=2), run)
    assert work.schedule is not None
    for step in range(6):
        chunks = work.chunks(step)
        assert [chunk for chunk, _ in chunks] == [ChunkId(step=step, wave=0, chunk=number) for number in range(3)]
        assert [len(rows) for _, rows in chunks] == [2, 2, 1]
        assert tuple(row for _, rows in chunks for row in rows) == work.schedule.rows(step)


def test_an_epoch_of_chunks_has_every_row_once(tmp_path: Path, run: RunDirectory) -> None:
    work = training_work(experiment(tmp_path, chunk_prompts=2), run)
    rows = [row for step in range(NUM_ROWS) for _, rows in work.chunks(step) for row in rows]
    for epoch in range(5):
        assert sorted(rows[epoch * NUM_ROWS : (epoch + 1) * NUM_ROWS]) == list(range(NUM_ROWS))


def test_a_further_wave_s_chunks_are_its_own_rows(tmp_path: Path, run: RunDirectory) -> None:
    work = training_work(experiment(tmp_path, chunk_prompts=2, max_waves=2), run)
    assert work.schedule is not None
    assert (work.max_waves, work.prompts_per_step) == (2, 5)
    chunks = work.chunks(3, 1)
    assert [chunk for chunk, _ in chunks] == [ChunkId(step=3, wave=1, chunk=number) for number in range(3)]
    assert tuple(row for _, rows in chunks for row in rows) == work.schedule.rows(3, 1)
    assert work.lease(chunks[2][0]) == "lease/rollouts/step-000003/wave-1/chunk-002"


def test_an_evaluation_has_one_wave(tmp_path: Path, run: RunDirectory) -> None:
    work = evaluation_work(experiment(tmp_path, max_waves=2), run)
    assert work is not None
    assert (work.max_waves, work.prompts_per_step) == (1, NUM_HELD_OUT)


def test_more_waves_than_the_data_has_rows_for_are_refused(tmp_path: Path, run: RunDirectory) -> None:
    with pytest.raises(ConfigError, match=r"max_waves \(3\) must be from 1 to 2"):
        training_work(experiment(tmp_path, max_waves=3), run)


def test_how_many_waves_may_follow_is_no_matter_of_what_a_shard_holds(tmp_path: Path, run: RunDirectory) -> None:
    one, two = (training_work(experiment(tmp_path, max_waves=most), run) for most in (1, 2))
    assert (one.sampling_hash, one.data_hash) == (two.sampling_hash, two.data_hash)


def test_a_chunk_larger_than_the_step_is_the_step(tmp_path: Path, run: RunDirectory) -> None:
    (chunk,) = training_work(experiment(tmp_path, chunk_prompts=99), run).chunks(3)
    assert len(chunk[1]) == 5


def test_by_default_an_engine_finds_two_chunks_a_step(tmp_path: Path, run: RunDirectory) -> None:
    work = training_work(experiment(tmp_path), run)
    assert work.chunk_prompts == 3
    assert [len(rows) for _, rows in work.chunks(0)] == [3, 2]


def test_training_work_takes_the_experiment_s_settings(tmp_path: Path, run: RunDirectory) -> None:
    work = training_work(experiment(tmp_path), run)
    assert (work.name, work.folder) == ("rollouts", run.rollouts)
    assert (work.group_size, work.temperature, work.max_completion_tokens, work.chat) == (3, 0.5, 4, True)
    assert [(reward.use, reward.weight) for reward in work.rewards] == [("exact_match", 2.0), ("format", 0.5)]
    assert len(work.data.prompts) == NUM_ROWS
    chunk = ChunkId(step=1, wave=0, chunk=2)
    assert work.path(chunk) == run.chunk(chunk) == run.root / "rollouts/step-000001/wave-0/chunk-002.h5"


def test_an_evaluation_goes_through_the_whole_dataset_in_order_at_every_version(
    tmp_path: Path, run: RunDirectory
) -> None:
    work = evaluation_work(experiment(tmp_path), run)
    assert work is not None
    for version in (0, 7):
        chunks = work.chunks(version)
        assert [len(rows) for _, rows in chunks] == [32, 32, 6]
        assert [row for _, rows in chunks for row in rows] == list(range(NUM_HELD_OUT))
        assert {chunk.step for chunk, _ in chunks} == {version}


def test_an_evaluation_is_one_completion_a_prompt_judged_by_exact_match_alone(
    tmp_path: Path, run: RunDirectory
) -> None:
    work = evaluation_work(experiment(tmp_path), run)
    assert work is not None
    assert (work.name, work.folder) == ("held_out", run.held_out)
    assert (work.group_size, work.temperature, work.max_completion_tokens, work.chat) == (1, 0.25, 4, False)
    assert [(reward.use, reward.weight) for reward in work.rewards] == [("exact_match", 1.0)]


def test_the_data_hash_is_that_of_prompts_and_schedule(tmp_path: Path, run: RunDirectory) -> None:
    made = experiment(tmp_path)
    first = training_work(made, run).data_hash
    assert training_work(made, RunDirectory(tmp_path / "other")).data_hash == first
    # Sampling is no matter of which prompts a step holds.
    assert training_work(experiment(tmp_path, temperature=0.7, group_size=2, chunk_prompts=1), run).data_hash == first
    assert training_work(experiment(tmp_path, prompts_per_step=4), run).data_hash != first
    assert training_work(made.model_copy(update={"seed": 6}), run).data_hash != first
    write_rows(tmp_path / "train.jsonl", NUM_ROWS - 1)
    assert training_work(made, run).data_hash != first


@pytest.mark.parametrize(
    "change", [{"temperature": 0.7}, {"group_size": 2}, {"max_completion_tokens": 5}, {"chunk_prompts": 2}]
)
def test_the_sampling_hash_changes_with_everything_that_a_shard_depends_on(
    tmp_path: Path, run: RunDirectory, change: dict[str, object]
) -> None:
    first = training_work(experiment(tmp_path), run).sampling_hash
    assert training_work(experiment(tmp_path), run).sampling_hash == first
    assert training_work(experiment(tmp_path, **change), run).sampling_hash != first


def test_the_sampling_hash_changes_with_the_data(tmp_path: Path, run: RunDirectory) -> None:
    made = experiment(tmp_path)
    first = training_work(made, run).sampling_hash
    write_rows(tmp_path / "train.jsonl", NUM_ROWS + 1)
    assert training_work(made, run).sampling_hash != first


def test_a_lease_has_the_name_of_its_work_and_chunk(tmp_path: Path, run: RunDirectory) -> None:
    chunk = ChunkId(step=1, wave=0, chunk=2)
    assert training_work(experiment(tmp_path), run).lease(chunk) == "lease/rollouts/step-000001/wave-0/chunk-002"


def test_without_an_evaluation_there_is_no_such_work(tmp_path: Path, run: RunDirectory) -> None:
    assert evaluation_work(experiment(tmp_path, evaluation=False), run) is None


def test_another_process_comes_to_the_same_chunks(tmp_path: Path, run: RunDirectory) -> None:
    code = """
import sys
from pathlib import Path
from towline.jobs.experiment import GrpoExperiment
from towline.jobs.work import training_work
from towline.storage.run_directory import RunDirectory
work = training_work(GrpoExperiment.model_validate_json(sys.stdin.read()), RunDirectory(Path(sys.argv[1])))
print([work.chunks(step) for step in range(20)])
"""
    made = experiment(tmp_path, chunk_prompts=2)
    command = [sys.executable, "-c", code, str(run.root)]
    printed = subprocess.run(command, input=made.model_dump_json(), capture_output=True, text=True, check=True).stdout
    assert printed == f"{[training_work(made, run).chunks(step) for step in range(20)]}\n"
