import io

from rich.console import Console

from towline.launcher.progress import RunProgress, phases_line


def shown(terminal: bool, metrics_row) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80)
    with RunProgress(console, 3) as progress:
        progress.on_phases({"trainer.0": "load", "trainer.1": "load", "rollout.0": "start"})
        progress.on_phases({"trainer.0": "load", "trainer.1": "load", "rollout.0": "start"})
        evaluation = {"version": 0, "accuracy": 0.5, "low": 0.1, "high": 0.9, "num_prompts": 2, "num_failed": 1}
        progress.on_evaluation(evaluation | {"seconds": 2.0})
        progress.on_phases({"trainer.0": "train", "trainer.1": "train", "rollout.0": "generate"})
        progress.on_step(metrics_row(0) | {"loss/kl": None})
    return stream.getvalue()


def test_without_a_terminal_there_is_one_plain_line_a_thing(metrics_row) -> None:
    assert shown(terminal=False, metrics_row=metrics_row).splitlines() == [
        "starting  2 trainer load · rollout start",
        "held-out accuracy at version 0: 0.500 (0.100 to 0.900) on 2 prompts, 1 could not be graded (2.0 s)",
        "step 1/3  reward 0.000  kl -  mismatch 3e-04  length 3  1,234 tok/s  10.0 s "
        "(generate 3.0 score 0.5 train 5.0 sync 1.0)",
    ]


def test_on_a_terminal_the_lines_stay_above_a_bar(metrics_row) -> None:
    text = shown(terminal=True, metrics_row=metrics_row)
    assert "\x1b[" in text
    assert "step 1/3  reward 0.000" in text
    assert "starting  2 trainer" not in text


def test_processes_that_do_the_same_are_written_once() -> None:
    phases = {"trainer.0": "train", "trainer.1": "train", "rollout.0": "generate", "scorer.0": "wait for shards"}
    assert phases_line(phases) == "2 trainer train · rollout generate · scorer wait for shards"
