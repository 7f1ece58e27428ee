from towline.launcher.held_out import held_out_summary, right_by_row
from towline.storage.ledger import sealed_chunks
from towline.storage.run_directory import RunDirectory


def test_each_prompt_is_right_or_wrong(run: RunDirectory) -> None:
    assert right_by_row(run, 0) == {0: False, 1: False}
    assert right_by_row(run, 3) == {0: False, 1: True}


def test_one_evaluation_has_no_difference(run: RunDirectory) -> None:
    run.evaluations.write_text(run.evaluations.read_text().split("\n")[0] + "\n")
    assert held_out_summary(run) == "0.000 (0.000 to 0.658) at version 0, 2 prompts"


def test_without_evaluations_there_is_no_summary(run: RunDirectory) -> None:
    run.evaluations.unlink()
    assert held_out_summary(run) is None


def test_shards_lie_where_runs_put_them(run: RunDirectory) -> None:
    assert [path.name for path in sealed_chunks(run.held_out, 3)] == ["chunk-000.h5"]
