"""`towline resume`: the same run goes on, or nothing is started and the reason is said."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from towline.jobs.experiment import ExperimentConfig
from towline.jobs.load_experiment import recorded_experiment
from towline.jobs.supervisor import Outcome
from towline.launcher import resume as resume_module
from towline.launcher import run as run_module
from towline.launcher.cli import command
from towline.launcher.resume import PARTS
from towline.launcher.run import make_run
from towline.storage.errors import RunFault
from towline.storage.run_directory import RunDirectory, RunLock

OTHER_VALUES = {
    "run.name": ("run.name", "other"),
    "run.root": ("run.root", "elsewhere"),
    "objective": ("objective", "sft"),  # there is one objective so far: refused by the experiment itself
    "seed": ("seed", "7"),
    "policy": ("policy.model", "other"),
    "data": ("data.train", "other.jsonl"),
    "rollout.prompts_per_step": ("rollout.prompts_per_step", "1"),
    "rollout.precision": ("rollout.precision", "float32"),
    "trainer.kl_beta": ("trainer.kl_beta", "0.5"),
    "trainer.zero_stage": ("trainer.zero_stage", "3"),
    "trainer.precision": ("trainer.precision", "float32"),
    "trainer.adam_betas": ("trainer.adam_betas", "[0.5, 0.9]"),
    "trainer.weight_decay": ("trainer.weight_decay", "0.5"),
}


class Started:
    """Attempts that the supervisor was asked for."""

    def __init__(self) -> None:
        self.attempts: list[tuple[RunDirectory, ExperimentConfig]] = []
        self.outcome: Outcome | RunFault = Outcome(status="done", next_step=3)

    def supervise(self, run: RunDirectory, experiment: ExperimentConfig, observer: object) -> Outcome:
        self.attempts.append((run, experiment))
        if isinstance(self.outcome, RunFault):
            raise self.outcome
        return self.outcome


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    started = Started()
    monkeypatch.setattr(run_module, "supervise", started.supervise)
    monkeypatch.setattr(resume_module, "machine_problems", lambda experiment: [])
    monkeypatch.setenv("TOWLINE_ALLOW_LOGIN", "1")
    return started


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    """Killed after two of its three steps."""
    run.write_state(status="failed", next_step=None, fault="rollout.0: killed")
    return run


def resume(run: RunDirectory, *overrides: str) -> int:
    return command(["resume", str(run.root), *(word for item in overrides for word in ("-o", item))])


def folder_of(run: RunDirectory) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(run.root.rglob("*")) if path.is_file()}


def test_a_run_goes_on_with_its_own_experiment(run: RunDirectory, started: Started):
    before = run.config.read_bytes()
    assert resume(run) == 0
    ((resumed, experiment),) = started.attempts
    assert resumed.root == run.root
    assert experiment == recorded_experiment(before)
    assert run.config.read_bytes() == before
    assert json.loads(run.environment.read_text())["overrides"] == []


def test_what_changes_nothing_of_the_past_may_be_changed_and_is_written_down(run: RunDirectory, started: Started):
    changes = ["steps=8", "trainer.learning_rate=1e-6", "local.engines=2", "run.max_restarts=0"]
    changes += ["rollout.temperature=0.5", "trainer.checkpoint_every=1"]
    assert resume(run, *changes) == 0
    ((_, experiment),) = started.attempts
    assert (experiment.steps, experiment.trainer.learning_rate, experiment.local.engines) == (8, 1e-6, 2)
    assert (experiment.run.max_restarts, experiment.rollout.temperature) == (0, 0.5)
    assert recorded_experiment(run.config.read_text()) == experiment
    assert json.loads(run.environment.read_text())["overrides"] == changes


def test_a_change_lasts_for_the_resumes_after_it(run: RunDirectory, started: Started):
    assert resume(run, "steps=8") == 0
    assert resume(run, "local.engines=2") == 0
    assert [(one.steps, one.local.engines) for _, one in started.attempts] == [(8, 1), (8, 2)]


def test_every_part_that_may_not_change_has_a_case_here():
    assert OTHER_VALUES.keys() == PARTS.keys()


@pytest.mark.parametrize("part", [part for part in PARTS if part != "objective"])
def test_a_change_of_what_the_run_is_made_of_is_refused_by_name(
    run: RunDirectory, started: Started, part: str, capsys: pytest.CaptureFixture[str]
):
    field, value = OTHER_VALUES[part]
    before = folder_of(run)
    assert resume(run, f"{field}={value}") == 2
    message = capsys.readouterr().err
    assert f"small-1 cannot go on with {field} = " in message
    assert f": {PARTS[part]} would not be that of the run, which has " in message
    assert "Nothing was started." in message
    assert (started.attempts, folder_of(run)) == ([], before)


def test_another_objective_is_refused(run: RunDirectory, started: Started, capsys: pytest.CaptureFixture[str]):
    assert resume(run, "objective=sft") == 2
    assert "objective: " in capsys.readouterr().err
    assert started.attempts == []


@pytest.mark.parametrize("change", ["data.template=x.txt", "data.chat=true"])
def test_all_of_data_is_the_data_cursor(
    run: RunDirectory, started: Started, change: str, capsys: pytest.CaptureFixture[str]
):
    assert resume(run, change) == 2
    assert "the data cursor would not be that of the run" in capsys.readouterr().err
    assert started.attempts == []


@pytest.mark.parametrize(
    ("objective", "option"), [("reward_model", "watcher=true"), ("dpo", "sweep={beta = [0.1, 0.2]}")]
)
def test_one_run_does_not_go_on_as_several(
    project, started: Started, objective: str, option: str, capsys: pytest.CaptureFixture[str]
):
    project.learn_from_pairs(objective)
    run = make_run(*project.read("run.name=pairs"))
    before = folder_of(run)
    assert resume(run, option) == 2
    assert "pairs is one run and cannot go on as several" in capsys.readouterr().err
    assert folder_of(run) == before
    assert started.attempts == []


def test_a_run_on_a_half_goes_on_with_it(project, started: Started, capsys: pytest.CaptureFixture[str]):
    project.learn_from_pairs("reward_model")
    run = make_run(*project.read("run.name=pairs", "data.half=first"))
    for option in ("data.half=second", "data.half_seed=1"):
        assert resume(run, option) == 2
        assert "the data cursor would not be that of the run" in capsys.readouterr().err
    assert resume(run) == 0
    assert len(started.attempts) == 1


def test_the_value_that_the_run_has_is_no_change(run: RunDirectory, started: Started):
    assert resume(run, "seed=0", "trainer.kl_beta=0.04") == 0
    assert len(started.attempts) == 1


def test_a_wrong_override_is_bad_input(run: RunDirectory, started: Started, capsys: pytest.CaptureFixture[str]):
    assert resume(run, "trainer.learning_rat=1") == 2
    assert "-o: trainer.learning_rat is not a field. Did you mean learning_rate?" in capsys.readouterr().err
    assert started.attempts == []


def test_a_finished_run_says_so_and_how_to_train_on(
    run: RunDirectory, started: Started, capsys: pytest.CaptureFixture[str]
):
    run.write_state(status="done", next_step=3)
    assert resume(run) == 2
    message = capsys.readouterr().err
    assert message.startswith("small-1 is done: 3 of 3 steps.")
    assert f"towline resume {run.root} -o steps=6" in message
    assert started.attempts == []
    assert resume(run, "steps=6") == 0
    assert len(started.attempts) == 1


def test_a_run_in_use_is_left_as_it_is(run: RunDirectory, started: Started, capsys: pytest.CaptureFixture[str]):
    with RunLock(run):
        before = folder_of(run)
        assert resume(run, "steps=8") == 2
        assert f"run folder {run.root} is in use by another supervisor" in capsys.readouterr().err
        assert (started.attempts, folder_of(run)) == ([], before)


def test_what_this_machine_lacks_is_found_before_anything_is_changed(
    run: RunDirectory, started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(resume_module, "machine_problems", lambda experiment: ["no mpirun"])
    before = folder_of(run)
    assert resume(run, "steps=8") == 2
    assert "no mpirun" in capsys.readouterr().err
    assert (started.attempts, folder_of(run)) == ([], before)


def test_without_a_name_the_latest_run_goes_on(project, started: Started, monkeypatch: pytest.MonkeyPatch):
    for name in ("older", "newer"):
        make_run(*project.read(f"run.name={name}"))
    monkeypatch.chdir(project.folder)
    assert command(["resume"]) == 0
    assert command(["resume", "--root", str(project.runs), "older"]) == 0
    assert [run.root.name for run, _ in started.attempts] == ["newer", "older"]


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (Outcome(status="stopped", next_step=2), 3),
        (RunFault("small-1 FAILED", checkpoint_kept=True), 3),
        (RunFault("small-1 FAILED", checkpoint_kept=False), 1),
    ],
)
def test_an_attempt_that_does_not_reach_the_end_exits_as_a_first_one_does(
    run: RunDirectory, started: Started, outcome: Outcome | RunFault, code: int
):
    started.outcome = outcome
    assert resume(run) == code


def test_a_login_node_is_refused_with_the_command_to_use(
    run: RunDirectory, started: Started, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found: Callable[..., Any] = lambda name: f"/usr/bin/{name}"  # noqa: E731
    monkeypatch.setattr("shutil.which", found)
    monkeypatch.delenv("TOWLINE_ALLOW_LOGIN")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert resume(run) == 2
    assert f"--wrap 'towline resume {run.root}'" in capsys.readouterr().err
    assert started.attempts == []
