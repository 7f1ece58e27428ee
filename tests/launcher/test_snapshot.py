"""A queued job runs what was there when it was submitted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import towline
from towline.jobs.experiment import GrpoExperiment
from towline.launcher.run import make_run
from towline.launcher.snapshot import MAX_NEIGHBOUR_BYTES, ROOMS, take_snapshot
from towline.rollout.rewards.mixture import RewardPart, code_hash, load_reward
from towline.storage.run_directory import RunDirectory

REWARD = """\
from pathlib import Path
from helpers import factor
from lib.deep import bonus

WORDS = Path(__file__).with_name("words.txt").read_text().split()

def grade(completion, gold):
    return factor * (completion in WORDS) + bonus
"""
OWN = '\n[[rewards]]\nuse = "mine/my reward.py:grade"\nweight = 0.5\n'


@pytest.fixture
def mine(project) -> Path:
    """A reward of the user's, with all that it needs beside it, and an experiment that uses it."""
    folder = project.folder / "mine"
    (folder / "lib").mkdir(parents=True)
    files = {"my reward.py": REWARD, "helpers.py": "factor = 2", "words.txt": "yes ja", "lib/__init__.py": "",
             "lib/deep.py": "bonus = 0.25", ".secret": "x"}  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text)
    project.change("weight = 1.0\n", f"weight = 1.0\n{OWN}")
    return folder


@pytest.fixture
def taken(project, mine: Path) -> tuple[RunDirectory, GrpoExperiment, GrpoExperiment]:
    """The run, and its experiment before and after."""
    file, experiment = project.read("run.name=snap")
    run = make_run(file, experiment)
    return run, experiment, take_snapshot(run, experiment)


def python(code: str, *, path: Path, cwd: Path) -> str:
    """A fresh one, with nothing but PYTHONPATH between it and the installed package."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=cwd, env=os.environ | {"PYTHONPATH": str(path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def parts(experiment: GrpoExperiment) -> list[RewardPart]:
    return [
        RewardPart(name=reward.part_name, function=load_reward(reward.use, Path("/")), weight=reward.weight)
        for reward in experiment.rewards
    ]


def test_every_module_is_copied_and_imported_from_the_copy(taken, tmp_path: Path) -> None:
    run, _, _ = taken
    source = Path(towline.__file__).parent
    for room in ROOMS:
        names = {str(path.relative_to(source)) for path in (source / room).rglob("*") if path.is_file()
                 and "__pycache__" not in path.parts}  # fmt: skip
        assert names <= {str(path.relative_to(run.code / "towline")) for path in (run.code / "towline").rglob("*")}
    modules = [
        "jobs.slurm.batch_entry",
        "jobs.slurm.srun",
        "jobs.scorer_role",
        "launcher.submit",
        "rollout.rewards",
        "storage",
    ]
    code = f"""
import importlib, json
print(json.dumps([importlib.import_module("towline." + name).__file__ for name in {modules}]))
"""
    files = json.loads(python(code, path=run.code, cwd=tmp_path))
    assert all(Path(file).is_relative_to(run.code / "towline") for file in files), files


def test_modules_are_compiled_already(taken) -> None:
    run, _, _ = taken
    modules = [path for path in (run.code / "towline").rglob("*.py")]
    assert len(list((run.code / "towline").rglob("*.pyc"))) == len(modules)


def test_the_own_reward_is_the_copy_and_keeps_its_name(taken) -> None:
    run, before, after = taken
    assert after.rewards[1].use == f"{run.code / 'rewards' / '1' / 'my reward.py'}:grade"
    assert [reward.part_name for reward in after.rewards] == [reward.part_name for reward in before.rewards]
    assert after.rewards[0] == before.rewards[0]
    assert after.model_copy(update={"rewards": before.rewards}) == before


def test_the_experiment_can_be_read_again(taken) -> None:
    _, _, after = taken
    assert GrpoExperiment.model_validate_json(after.model_dump_json()) == after


def test_the_code_of_the_rewards_counts_as_the_same(taken) -> None:
    _, before, after = taken
    assert code_hash(parts(before)) == code_hash(parts(after))


def test_what_is_edited_afterwards_changes_nothing(taken, mine: Path) -> None:
    _, _, after = taken
    for path in (mine / "my reward.py", mine / "helpers.py", mine / "lib" / "deep.py", mine / "words.txt"):
        path.write_text("raise RuntimeError")
    grade = load_reward(after.rewards[1].use, Path("/"))
    assert (grade("yes", ""), grade("no", "")) == (2.25, 0.25)


def test_neither_what_is_hidden_nor_what_is_large_is_copied(project, mine: Path) -> None:
    (mine / "data.jsonl").write_bytes(bytes(MAX_NEIGHBOUR_BYTES + 1))
    (mine / "gone.txt").symlink_to("nowhere")
    run = make_run(*project.read("run.name=snap"))
    take_snapshot(run, project.read()[1])
    names = {path.name for path in (run.code / "rewards" / "1").iterdir()}
    assert names == {"my reward.py", "helpers.py", "words.txt", "lib"}


def test_without_own_rewards_there_is_no_copy(project) -> None:
    file, experiment = project.read("run.name=snap")
    run = make_run(file, experiment)
    assert take_snapshot(run, experiment) == experiment
    assert not (run.code / "rewards").exists()
