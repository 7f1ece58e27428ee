import pytest

from towline.jobs.load_experiment import recorded_experiment
from towline.jobs.supervisor import Outcome
from towline.jobs.work import training_work
from towline.launcher import replay as replay_module
from towline.launcher.cli import command
from towline.launcher.replay import compare_losses, table
from towline.storage.errors import LedgerError
from towline.storage.ledger import scores_path
from towline.storage.metrics import append_jsonl
from towline.storage.run_directory import RunDirectory


def replay(run: RunDirectory, losses: dict[int, float], monkeypatch: pytest.MonkeyPatch, step: int = 2) -> int:
    """Replay with the given losses in place of a trainer, which the supervisor gives an attempt of its own."""

    def supervise(run: RunDirectory, experiment, observer, *, replay_step: int) -> Outcome:
        folder = run.logs(run.attempts)
        folder.mkdir(parents=True)
        for step, loss in losses.items():
            append_jsonl(folder / "replay.jsonl", {"step": step, "loss/policy": loss})
        return Outcome(status="done", next_step=replay_step + 1)

    monkeypatch.setattr(replay_module, "supervise", supervise)
    return command(["replay", str(run.root), "--step", str(step)])


def test_the_same_losses_exit_with_0(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(run, {1: 0.4, 2: 0.3 + 5e-7}, monkeypatch) == 0
    assert capsys.readouterr().out.splitlines() == [
        "  step       live loss        replayed     change",
        "     1     +0.40000000     +0.40000000   +0.0e+00",
        "     2     +0.30000000     +0.30000050   +5.0e-07",
        "2 of 2 steps within 1e-06; largest difference 5.0e-07",
    ]


@pytest.mark.parametrize("loss", [0.3 + 2e-6, float("nan")])
def test_another_loss_exits_with_1(
    run: RunDirectory, loss: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(run, {1: 0.4, 2: loss}, monkeypatch) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("differs")
    assert lines[3].startswith("1 of 2 steps within")


def test_a_step_that_was_not_trained(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["replay", str(run.root), "--step", "9"]) == 2
    assert capsys.readouterr().err == "small-1 has trained steps 0 to 2; step 9 cannot be replayed.\n"


def test_a_step_that_ended_the_run_is_replayed_once_its_rollouts_were_scored(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where what ended it is gone, the losses have nothing to agree with."""
    work = training_work(recorded_experiment(run.config.read_text()), run)
    for chunk, _ in work.chunks(3):
        for path in (work.path(chunk), scores_path(work.path(chunk))):
            assert replay(run, {3: 0.2}, monkeypatch, step=3) == 2
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    capsys.readouterr()
    assert replay(run, {3: 0.2}, monkeypatch, step=3) == 1
    assert capsys.readouterr().out.splitlines()[1].split() == ["3", "+nan", "+0.20000000", "+nan", "differs"]


def test_a_replay_without_a_step_is_an_error() -> None:
    with pytest.raises(LedgerError):
        compare_losses({}, [])


def test_the_largest_difference_may_be_negative() -> None:
    losses = compare_losses({0: {"loss/policy": 1.0}}, [{"step": 0, "loss/policy": 0.5}])
    assert table(losses)[-1] == "0 of 1 steps within 1e-06; largest difference 5.0e-01"


def test_a_round_without_a_pair_is_the_same_again_and_not_one_with_pairs():
    nothing = {"step": 3, "preference/pairs": 0.0}
    learned = {"step": 3, "preference/pairs": 2.0, "loss/preference": 0.7}
    assert [one.is_same for one in compare_losses({3: nothing}, [nothing])] == [True]
    assert [one.is_same for one in compare_losses({3: learned}, [learned])] == [True]
    assert [one.is_same for one in compare_losses({3: learned}, [nothing])] == [False]
