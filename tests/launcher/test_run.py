import json
import stat

import numpy as np
import pytest

from towline.jobs.load_experiment import recorded_experiment
from towline.jobs.supervisor import Outcome
from towline.launcher import run as run_module
from towline.launcher.cli import command
from towline.launcher.run import make_run
from towline.launcher.summary import duration, summary_lines
from towline.storage.errors import RunFault
from towline.storage.held_out_values import keep_held_out
from towline.storage.metrics import append_jsonl
from towline.storage.run_directory import RunDirectory


def test_a_new_run_folder_tells_what_it_was_made_of(project) -> None:
    file, experiment = project.read("steps=5")
    run = make_run(file, experiment)
    written = recorded_experiment(run.config.read_text())
    assert written.steps == 5
    assert written.run.name == run.root.name
    assert written.policy.model == str(project.model)
    assert run.source_config.read_text() == file.text
    environment = json.loads(run.environment.read_text())
    assert environment["overrides"] == ["steps=5"]
    assert {"towline", "numpy", "h5py", "pydantic"} <= environment["packages"].keys()
    assert {"git_commit", "python", "host", "argv"} <= environment.keys()
    assert stat.S_IMODE(run.root.stat().st_mode) == 0o700


def test_runs_of_one_second_get_different_names(project) -> None:
    file, experiment = project.read()
    names = {make_run(file, experiment).root.name for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("small-") for name in names)


def test_a_stop_by_the_user_exits_with_3_and_says_what_is_kept(
    project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_nothing(monkeypatch, lambda run: Outcome(status="stopped", next_step=2))
    assert command(["run", str(project.file), "-o", "run.name=mine"]) == 3
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "stopped at step 2 with checkpoint 2 kept",
        f"next      towline resume {project.runs / 'mine'}",
    ]


def test_a_finished_run_exits_with_0(project, monkeypatch: pytest.MonkeyPatch) -> None:
    start_nothing(monkeypatch, lambda run: Outcome(status="done", next_step=3))
    assert command(["run", str(project.file)]) == 0


@pytest.fixture
def pairs(project, monkeypatch: pytest.MonkeyPatch):
    """Starting a tokenizer takes seconds."""
    monkeypatch.setattr("towline.launcher.example_preflight.can_tokenize", lambda: False)
    project.learn_from_pairs("dpo")
    return project


@pytest.mark.parametrize(
    ("objective", "option", "names", "told"),
    [
        ("reward_model", "watcher=true", ["mine", "mine-watcher"], "same verdict on 0.667"),
        ("dpo", "sweep.beta=[0.1, 0.2]", ["mine-beta-0.1", "mine-beta-0.2"], "less than the best"),
    ],
)
def test_several_runs_follow_each_other_and_are_compared(
    pairs, objective: str, option: str, names: list[str], told: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    done: list[str] = []

    def end(run: RunDirectory) -> Outcome:
        done.append(run.root.name)
        margins = np.array([1.0, 1.0, -1.0 if len(done) == 1 else 1.0])
        keep_held_out(run, 3, (margins + 1) / 2, [1] * 3, margins)
        row = {"version": 3, "measure": "accuracy", "estimate": (margins > 0).mean(), "low": 0.1, "high": 0.9}
        append_jsonl(run.evaluations, row | {"margin": 0.5, "calibration_error": 0.1, "num_examples": 3, "seconds": 1})
        return Outcome(status="done", next_step=3)

    start_nothing(monkeypatch, end)
    assert command(["run", str(pairs.file), "-o", "run.name=mine", "-o", f"objective={objective}", "-o", option]) == 0
    assert done == names
    for name in names:
        assert recorded_experiment(RunDirectory(pairs.runs / name).config.read_text()).run.name == name
    assert told in capsys.readouterr().out


def test_nothing_is_started_where_the_second_of_two_runs_could_not_be(
    pairs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_nothing(monkeypatch, lambda run: Outcome(status="done", next_step=3))
    (pairs.runs / "mine-beta-0.2").mkdir(parents=True)
    assert command(["run", str(pairs.file), "-o", "run.name=mine", "-o", "sweep.beta=[0.1, 0.2]"]) == 2
    assert "mine-beta-0.2 exists; nothing is overwritten" in capsys.readouterr().err
    assert [path.name for path in pairs.runs.iterdir()] == ["mine-beta-0.2"]


def test_after_a_stop_the_next_of_several_runs_does_not_begin(pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    start_nothing(monkeypatch, lambda run: Outcome(status="stopped", next_step=2))
    assert command(["run", str(pairs.file), "-o", "run.name=mine", "-o", "sweep.beta=[0.1, 0.2]"]) == 3
    assert [path.name for path in pairs.runs.iterdir()] == ["mine-beta-0.1"]


@pytest.mark.parametrize(("checkpoint_kept", "code"), [(True, 3), (False, 1)])
def test_a_fault_exits_by_whether_a_checkpoint_is_kept(
    project, checkpoint_kept: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(run: RunDirectory) -> Outcome:
        raise RunFault("mine FAILED: rollout.0", checkpoint_kept=checkpoint_kept)

    start_nothing(monkeypatch, fail)
    assert command(["run", str(project.file)]) == code
    assert capsys.readouterr().err == "mine FAILED: rollout.0\n"


def start_nothing(monkeypatch: pytest.MonkeyPatch, supervise) -> None:
    """Put the given end of a run in place of its processes, and leave out what this machine may lack."""
    monkeypatch.setattr(run_module, "supervise", lambda run, experiment, observer: supervise(run))
    monkeypatch.setattr(run_module, "machine_problems", lambda experiment: [])
    monkeypatch.setenv("TOWLINE_ALLOW_LOGIN", "1")


def test_the_summary_tells_what_the_run_brought(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.root.parent.parent)
    experiment = recorded_experiment(run.config.read_text())
    assert list(summary_lines(run, experiment, 62.0)) == [
        "",
        "steps     3/3 in 1 min 02 s",
        "reward    0.000 → 0.500",
        "failures  8.3 % of the rewards: towline samples small-1 --failed",
        "held-out  0.000 → 0.500   difference +0.500 (-0.563 to +1.000), 2 prompts",
        "look      towline status small-1 · towline samples small-1",
        "prove     towline replay small-1 --step 2",
    ]


def test_the_summary_names_the_root_where_it_is_needed(run: RunDirectory) -> None:
    experiment = recorded_experiment(run.config.read_text())
    assert f"towline status small-1 --root {run.root.parent}" in "\n".join(summary_lines(run, experiment, 1.0))


@pytest.mark.parametrize(("seconds", "text"), [(5.4, "5 s"), (62, "1 min 02 s"), (3725, "1 h 02 min")])
def test_durations_read_easily(seconds: float, text: str) -> None:
    assert duration(seconds) == text
